"""Attacks of one job on another that runs at the same time.

Owns their two programs. The first holds a secret and waits; the second looks for it. Only the first is told the secret, so it
comes out of the second only where the two are not apart.
"""

from __future__ import annotations

from rollbook.core.host import host
from rollbook.sandbox.attacks.bait import look, secret
from rollbook.sandbox.attacks.probe import SLACK_S, Attack, Trial, Untried

_OFFER = """
import threading
listeners = []
def serve(listener):
    while True:
        connection = listener.accept()[0]
        connection.sendall(B["secret"].encode())
        connection.close()
def offer(family, address):
    try:
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen(4)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    except OSError:
        pass
offer(socket.AF_UNIX, "\\0job-" + B["mark"])
offer(socket.AF_INET, ("127.0.0.1", B["port"]))
_libc.shmat.restype = ctypes.c_void_p
shared = _libc.shmget(B["key"], 4096, 0o1666)
if shared >= 0:
    address = _libc.shmat(shared, None, 0)
    if address and address != ctypes.c_void_p(-1).value:
        ctypes.memmove(address, B["secret"].encode(), len(B["secret"]))
        _libc.shmctl(shared, 0, None)
"""

_CALL = """
def ask(family, address):
    try:
        with socket.socket(family) as s:
            s.settimeout(1)
            s.connect(address)
            leak(s.recv(200))
    except OSError:
        pass
ask(socket.AF_UNIX, "\\0job-" + B["mark"])
ask(socket.AF_INET, ("127.0.0.1", B["port"]))
_libc.shmat.restype = ctypes.c_void_p
shared = _libc.shmget(B["key"], 4096, 0)
if shared >= 0:
    address = _libc.shmat(shared, None, 0)
    if address and address != ctypes.c_void_p(-1).value:
        leak(ctypes.string_at(address, 200))
"""

_PUT = """
for place in (".", "/tmp", "/var/tmp", "/dev/shm"):
    try:
        with open(f"{place}/{B['mark']}", "w") as file:
            file.write(B["secret"])
    except OSError:
        pass
say("directory " + os.getcwd())
"""

_FIND = """
places = [".", "..", "/tmp", "/var/tmp", "/dev/shm", f"/proc/{B['other']}/cwd", f"/proc/{B['other']}/root/tmp"]
for place in places:
    leak(read(f"{place}/{B['mark']}"))
for top in ("/tmp", "/var/tmp", "/dev/shm", "..", "/work", "/scratch"):
    try:
        for n, (directory, names, files) in enumerate(os.walk(top)):
            if B["mark"] in files:
                leak(read(os.path.join(directory, B["mark"])))
            if n > 3000:
                break
    except RecursionError:  # somebody left a deep tree there
        pass
leak(read(f"/proc/{B['other']}/environ"))
"""

_KILL = """
for pid in [B["other"], *[int(name) for name in (os.listdir("/proc") if os.path.isdir("/proc") else []) if name.isdigit()]]:
    if pid == B["other"] and pid > 0:
        try:
            os.kill(pid, 9)
        except OSError:
            pass
"""


def _pair(trial: Trial, first_source: str, second_source: str) -> bool:
    """Run the second program while the first holds; whether the first was still there at the end."""
    trial.bait.secrets[trial.mark] = held = secret("neighbour")
    key = int(trial.mark[:7], 16) + 1
    more: dict[str, object] = {"port": 20_000 + key % 20_000, "key": key}
    first = trial.sandbox.start(trial.program(first_source, {**more, "secret": held}), trial.limits)
    try:
        if first.read_line(trial.attack.limits.wall_s + SLACK_S) != b"tried":
            raise Untried(f"the first job did not hold: {first.wait().reason}")
        there = look(trial.name)
        if not there:
            raise Untried("the first job could not be seen from outside")
        second_name = f"{trial.name}b"
        program = trial.program(second_source, {**more, "other": there[-1].pid, "name": second_name})
        second = trial.sandbox.start(program, trial.limits)
        trial.held = second.read_line(trial.attack.limits.wall_s + SLACK_S) == b"tried"
        alive = _stays(trial.name)
        trial.execution = second.wait()
    finally:
        first.close_input()
        first.wait()
    return alive


def _stays(name: str) -> bool:
    """Whether a process is still there when a signal that was on its way has had its effect."""
    deadline = host().monotonic() + 0.3
    while look(name):
        if host().monotonic() >= deadline:
            return True
        host().sleep(0.02)
    return False


def _talk(trial: Trial) -> None:
    _pair(trial, _OFFER, _CALL)


def _peek(trial: Trial) -> None:
    _pair(trial, _PUT, _FIND)


def _fight(trial: Trial) -> None:
    if not _pair(trial, "", _KILL):
        trial.noticed.append("it ended another job")


ATTACKS = (
    Attack("jobs_talk", "pass a secret to another job over sockets or shared memory", _CALL, stage=1, drive=_talk),
    Attack("jobs_see_files", "find the files of another job", _FIND, stage=1, drive=_peek),
    Attack("jobs_fight", "end another job", _KILL, stage=1, drive=_fight),
)
