"""Attacks on the machine's time, memory, processes, disk and output.

Owns sources, limits and what is looked for. Each stops by itself a little above its limit, so that one which succeeds does no
harm: 64 processes, half a gigabyte, 64 MB of files. Limits here are small so that a pass takes seconds.
"""

from __future__ import annotations

from rollbook.core.sandboxing import Limits
from rollbook.sandbox.attacks.probe import Attack, Trial

_MB = 1 << 20
_TIME = Limits(cpu_s=1.0, wall_s=2.0, memory_bytes=256 * _MB, processes=8, output_bytes=64 << 10, disk_bytes=8 * _MB)
_SPACE = Limits(cpu_s=4.0, wall_s=10.0, memory_bytes=128 * _MB, processes=8, output_bytes=64 << 10, disk_bytes=8 * _MB)


def _many(trial: Trial) -> str:
    """Its own first process and the backend's guard may count beside those it was allowed."""
    n = len(trial.seen)
    return f"{n} processes at once" if n > trial.attack.limits.processes + 2 else ""


def _heavy(trial: Trial) -> str:
    held = sum(process.rss_bytes for process in trial.seen)
    return f"it held {held >> 20} MB" if held > 1.5 * trial.attack.limits.memory_bytes else ""


def _too_much_output(trial: Trial) -> str:
    n = len(trial.execution.stdout) if trial.execution else 0
    return f"{n} bytes of output were taken in" if n > 2 * trial.attack.limits.output_bytes else ""


ATTACKS = (
    Attack("endless_loop", "compute for ever", "while True:\n    pass\n", limits=_TIME),
    Attack("endless_sleep", "sleep for ever", "while True:\n    time.sleep(1000)\n", limits=_TIME),
    Attack(
        "ignoring_signals",
        "compute for ever with every signal ignored and blocked, in several processes",
        """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for _ in range(2):
    try:
        os.fork()
    except OSError:
        pass
while True:
    pass
""",
        limits=_TIME,
    ),
    Attack(
        "endless_output",
        "write for ever, to both outputs",
        """
block = b"x" * 65536
for _ in range(64):
    os.write(1, block)
    os.write(2, block)
time.sleep(0.5)
""",
        stage=1,
        limits=_TIME,
        afterwards=_too_much_output,
    ),
    Attack(
        "fork_bomb",
        "start processes that start processes",
        """
made = 0
for _ in range(64):
    try:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
    except OSError:
        time.sleep(0.002)
if made > B["processes"] + 2:
    escaped(f"{made} processes started")
""",
        stage=2,
        limits=_SPACE,
        while_held=_many,
    ),
    Attack(
        "thread_bomb",
        "start threads without end",
        """
import threading
made = 0
for _ in range(64):
    try:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        made += 1
    except RuntimeError:
        time.sleep(0.002)
if made > B["processes"] + 2:
    escaped(f"{made} threads started")
""",
        stage=2,
        limits=_SPACE,
    ),
    Attack(
        "memory_touched",
        "take memory and use it",
        """
held = []
for _ in range(B["memory"] * 3 // (4 << 20)):
    try:
        held.append(bytearray(b"x") * (4 << 20))
    except MemoryError:
        break
if len(held) * (4 << 20) > B["memory"] * 3 // 2:
    escaped(f"held {len(held) * 4} MB")
""",
        stage=1,
        limits=_SPACE,
        while_held=_heavy,
    ),
    Attack(
        "memory_mapped",
        "map 8 GB, private and shared",
        """
import mmap
for flags in (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000):
    try:
        area = mmap.mmap(-1, 8 << 30, flags=flags)
    except (OSError, MemoryError):
        continue
    escaped("mapped 8 GB")
    area.close()
""",
        stage=1,
        limits=_SPACE,
    ),
    Attack(
        "memory_in_files",
        "hide memory in anonymous files, which no process's size shows",
        """
block, total, held = b"x" * (1 << 20), 0, []
while total < B["memory"] * 2:
    fd, number = call("memfd_create", b"hidden", ctypes.c_long(0))
    if fd < 0:
        break
    held.append(fd)
    try:
        for _ in range(4):
            total += os.write(fd, block)
    except OSError:
        break
if total > B["memory"] * 3 // 2:
    escaped(f"holds {total >> 20} MB in anonymous files")
""",
        stage=1,
        limits=_SPACE,
    ),
    Attack(
        "memory_by_many",
        "stay below the limit in each of several processes, and far above it together",
        """
share = B["memory"] * 2 // 3
children = []
for _ in range(5):
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        try:
            held = bytearray(b"x") * share
            os.write(writer, b"y")
        except MemoryError:
            os._exit(1)
        time.sleep(30)
        os._exit(0)
    os.close(writer)
    children.append(reader)
done = sum(os.read(reader, 1) == b"y" for reader in children)
time.sleep(1.0)
""",
        stage=2,
        limits=_SPACE,
        while_held=_heavy,
    ),
    Attack(
        "disk_one_file",
        "fill the disk with one file",
        """
block, total = b"x" * (1 << 20), 0
try:
    with open("large", "wb", buffering=0) as file:
        while total < B["disk"] * 4:
            total += file.write(block)
except OSError:
    pass
if total > B["disk"] * 3 // 2:
    escaped(f"wrote {total >> 20} MB")
""",
        stage=1,
        limits=_SPACE,
    ),
    Attack(
        "disk_many_files",
        "fill the disk with many small files, wherever it can write",
        """
import tempfile
block, total = b"x" * 65536, 0
for n, place in enumerate((".", "/tmp", "/var/tmp", "/dev/shm")):
    for i in range(B["disk"] * 2 // len(block)):
        try:
            with open(f"{place}/{B['mark']}-{n}-{i}", "wb", buffering=0) as file:
                total += file.write(block)
        except OSError:
            break
if total > B["disk"] * 3 // 2:
    escaped(f"wrote {total >> 20} MB")
for n, place in enumerate((".", "/tmp", "/var/tmp", "/dev/shm")):
    for i in range(B["disk"] * 2 // len(block)):
        try:
            os.unlink(f"{place}/{B['mark']}-{n}-{i}")
        except OSError:
            break
""",
        stage=1,
        limits=_SPACE,
    ),
    Attack(
        "disk_unlinked",
        "fill the disk with open files that have no name any more",
        """
block, total, held = b"x" * (1 << 20), 0, []
try:
    for n in range(B["disk"] * 3 // len(block)):
        held.append(os.open(f"unlinked-{n}", os.O_CREAT | os.O_RDWR))
        os.unlink(f"unlinked-{n}")
        total += os.write(held[-1], block)
except OSError:
    pass
time.sleep(0.5)
if total > B["disk"] * 3 // 2:
    escaped(f"holds {total >> 20} MB in files without a name")
""",
        stage=1,
        limits=_SPACE,
    ),
)
