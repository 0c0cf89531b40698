"""What every backend promises, and the traps that each fell into once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.core.errors import ConfigError
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Program, Sandbox, blame_of
from rollbook.sandbox import zygote as zygotes
from rollbook.sandbox import zygote_main
from rollbook.sandbox.backends import make_backend
from rollbook.sandbox.cgroups import Groups
from rollbook.sandbox.outcome import Report, status_of
from rollbook.sandbox.seccomp import filter_program

S = SandboxStatus
LIMITS = Limits(cpu_s=0.5, wall_s=4.0, memory_bytes=128 << 20, processes=8, output_bytes=100_000, disk_bytes=8 << 20)
LONG = Limits(cpu_s=60, wall_s=60)
NAMES = ("zygote", "bubblewrap", "landlock", "unsafe")


@pytest.fixture(scope="module", params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = make_backend(request.param, 4)
    yield sandbox
    sandbox.close()


@pytest.fixture(params=NAMES[:3])
def containing(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = make_backend(request.param, 2)
    yield sandbox
    sandbox.close()


ORPHAN = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    {}\n    os._exit(0)\n  os._exit(0)"
ENDINGS = {
    "print(1)": S.OK,
    "1 / 0": S.RUNTIME_ERROR,
    "def f(:": S.SYNTAX_ERROR,
    "import os; os._exit(0)": S.EARLY_EXIT,
    "import sys; sys.exit(0)": S.EARLY_EXIT,
    "raise KeyboardInterrupt": S.RUNTIME_ERROR,
    "import os; os.kill(os.getpid(), 9)": S.CRASHED,
    "import os; os.abort()": S.CRASHED,
    "while True: pass": S.TIMEOUT_CPU,
    "x = bytearray(1 << 30)": S.OOM,
    "try: x = bytearray(1 << 30)\nexcept MemoryError: print(1)": S.OK,
    "print('x' * 200_000)": S.OUTPUT_LIMIT,
    "import os\nwhile True: os.write(3, b'x' * 1000)": S.OUTPUT_LIMIT,
    "open('a', 'wb').write(b'x' * (16 << 20))": S.DISK_LIMIT,
}


@pytest.mark.parametrize("source", ENDINGS)
def test_a_program_ends_alike_in_every_backend(backend: Sandbox, source: str) -> None:
    ended = backend.run(Program(source), LIMITS)
    assert ended.status is ENDINGS[source], ended
    assert ended.blame is blame_of(ended.status) and ended.backend == backend.name
    assert bool(ended.enforced) and ended.attempts == 1


def test_set_up_serve_input_and_files_are_alike_in_every_backend(backend: Sandbox) -> None:
    setup = "import sys\ndef serve(ns, answer):\n  for line in sys.stdin: answer(ns['f'](line.strip()).encode())"
    job = backend.start(Program("def f(x): return open('a/b.txt').read() + x", setup, {"a/b.txt": b"got "}), LIMITS)
    job.send(b"one\n")
    assert job.read_line(4.0) == b"got one"
    job.send(b"two\n")
    ended = job.wait()
    assert (ended.status, ended.answers) == (S.OK, b"got two\n")
    failed = backend.run(Program("print(1)", setup="raise OSError('no set-up')"), LIMITS)
    assert (failed.status, failed.blame, failed.stdout) == (S.INFRA_SETUP, Blame.INFRA, b"")


def test_the_hash_seed_is_what_was_asked_for(backend: Sandbox) -> None:
    source = "print(hash('alpha'))"
    first, again, other = (backend.run(Program(source, hash_seed=seed), LIMITS).stdout for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    "claim", ['{"end": "infra_lost"}', '{"end": "cancelled"}', "not even JSON", '{"end": "ok"}' * 2000, "[" * 8000]
)
def test_a_forged_claim_stays_the_programs_own_failure(backend: Sandbox, claim: str) -> None:
    ended = backend.run(Program(f"import os\nos.write(4, {claim!r}.encode())\nos._exit(0)"), LIMITS)
    assert (ended.status, ended.blame) == (S.EARLY_EXIT, Blame.MODEL)


def test_a_second_ready_byte_or_a_closed_claim_pipe_blames_the_program(backend: Sandbox) -> None:
    for source in (
        "import os; os.write(4, b'R'); os._exit(0)",
        "import os; os.close(4); os._exit(3)",
        "import os; os.closerange(0, 9)",
    ):
        ended = backend.run(Program(source), LIMITS)
        assert ended.blame is Blame.MODEL, (source, ended)


def test_a_child_that_holds_every_pipe_does_not_keep_the_job_from_ending(containing: Sandbox) -> None:
    leaves = ORPHAN.format("time.sleep(50)")
    ended = containing.run(Program(leaves), LONG)
    assert ended.status is S.OK and ended.wall_s < 40
    again = containing.run(Program("import os\nprint(os.getpid())"), LIMITS)
    assert again.status is S.OK


def test_processor_time_counts_for_processes_that_hide_their_end(containing: Sandbox) -> None:
    hides = (
        "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n"
        "  if os.fork() == 0:\n    t = time.process_time() + 0.2\n    while time.process_time() < t: pass\n    os._exit(0)\n"
        "  time.sleep(0.25)"
    )
    assert containing.run(Program(hides), Limits(cpu_s=0.5, wall_s=30)).status is S.TIMEOUT_CPU


def test_orphans_count_for_processor_time_and_memory(containing: Sandbox) -> None:
    spinning = ORPHAN.format("while True: pass") + "\ntime.sleep(25)"
    assert containing.run(Program(spinning), Limits(cpu_s=0.5, wall_s=30)).status is S.TIMEOUT_CPU
    crowd = (
        "import os, time\nfor i in range(6):\n  if os.fork() == 0:\n"
        "    a = bytearray(60 << 20); time.sleep(20)\n    os._exit(0)\ntime.sleep(20)"
    )
    assert containing.run(Program(crowd), Limits(memory_bytes=128 << 20, wall_s=30)).status is S.OOM


def test_memory_counts_where_the_first_thread_of_a_process_has_ended(containing: Sandbox) -> None:
    source = (
        "import ctypes, os, threading, time\n"
        "def hold():\n  time.sleep(0.3)\n  held = bytearray(b'x') * (50 << 20)\n  time.sleep(20)\n"
        "for i in range(5):\n  if os.fork() == 0:\n    threading.Thread(target=hold, daemon=True).start()\n"
        "    ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\ntime.sleep(20)"
    )
    assert containing.run(Program(source), Limits(memory_bytes=128 << 20, wall_s=30, processes=32)).status is S.OOM


def test_the_limit_of_processes_holds_for_roots_jobs_as_well(containing: Sandbox) -> None:
    bomb = (
        "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(20)\n    n += 1\nexcept OSError: print(n)"
    )
    ended = containing.run(Program(bomb), LIMITS)
    assert ended.status is S.OK and 1 <= int(ended.stdout) <= LIMITS.processes


def test_jobs_of_two_backends_do_not_share_a_users_limits(containing: Sandbox) -> None:
    other = make_backend(containing.name, 1)
    crowd = "import os, time\nfor i in range(6):\n  if os.fork() == 0: time.sleep(1); os._exit(0)\ntime.sleep(0.5)\nprint('all')"
    try:
        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(lambda one: one.run(Program(crowd), Limits(processes=8)), (containing, other)))
        assert [e.stdout for e in ended] == [b"all\n"] * 2, ended
    finally:
        other.close()


def test_no_process_of_the_machine_can_be_reached_or_named(containing: Sandbox) -> None:
    by_libc = "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nif l.{} < 0: raise OSError(ctypes.get_errno(), 'denied')"
    for source in (
        f"import os; os.kill({os.getpid()}, 0)",
        "open('/proc/1/environ', 'rb').read()",
        "import _socket; _socket.socket()",
        by_libc.format("ptrace(0, 0, 0, 0)"),
        by_libc.format("unshare(0x10000000)"),
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
    ):
        ended = containing.run(Program(source), LIMITS)
        assert (ended.status, ended.blame) == (S.RUNTIME_ERROR, Blame.MODEL), (source, ended)


def test_installed_packages_are_not_shown_to_a_job() -> None:
    hidden = zygote_main.packages()
    source = f"import os\nfor p in {hidden!r}:\n  if os.path.isdir(p):\n    try: print(os.listdir(p))\n    except OSError: pass"
    for name in NAMES[:3]:
        sandbox = make_backend(name, 1)
        try:
            ended = sandbox.run(Program(source), LIMITS)
            assert hidden and ended.status is S.OK and set(ended.stdout.splitlines()) <= {b"[]"}, ended
        finally:
            sandbox.close()


def test_nothing_under_the_root_can_be_written_but_the_scratch_space(containing: Sandbox) -> None:
    source = (
        "import json, os, sys\nbad = []\nfor top, names, files in os.walk('/'):\n"
        "  if top.startswith(('/work', '/tmp', '/proc', '/sys', os.getcwd())): names.clear(); continue\n"
        "  if top.count('/') > 4: names.clear()\n"
        "  try: os.close(os.open(top + '/planted', os.O_CREAT | os.O_WRONLY)); bad.append(top)\n  except OSError: pass\n"
        "print(json.dumps(bad))"
    )
    ended = containing.run(Program(source), Limits(cpu_s=10, wall_s=30))
    assert json.loads(ended.stdout) == []


def test_many_short_answers_cost_their_reader_no_quadratic_time() -> None:
    sandbox = make_backend("zygote", 1)
    try:
        job = sandbox.start(
            Program("pass", "def serve(ns, answer):\n  for i in range(200_000): answer(b'')"), Limits(cpu_s=20, wall_s=40)
        )
        lines = 0
        while job.read_line(40.0) is not None:
            lines += 1
        assert lines == 200_000 and job.wait().status is S.OK
    finally:
        sandbox.close()


def test_input_that_nobody_reads_is_lost_and_harms_no_other_file() -> None:
    sandbox = make_backend("zygote", 1)
    try:
        job = sandbox.start(Program("import time; time.sleep(0.3)"), LIMITS)
        job.send(b"x" * (1 << 20))
        assert job.wait().status is S.OK
    finally:
        sandbox.close()


def test_killing_from_many_threads_while_one_waits_ends_it_once() -> None:
    sandbox = make_backend("zygote", 1)
    try:
        job = sandbox.start(Program("import time; time.sleep(50)"), LONG)
        threads = [threading.Thread(target=job.kill) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert job.wait().status is S.CANCELLED
        for thread in threads:
            thread.join()
        assert sandbox.run(Program("print(1)"), LIMITS).status is S.OK, "its slot is free"
    finally:
        sandbox.close()


def test_a_larger_limit_after_a_smaller_one_in_the_same_group_is_set() -> None:
    sandbox = make_backend("zygote", 1)
    try:
        small = sandbox.run(Program("pass"), Limits(memory_bytes=64 << 20))
        large = sandbox.run(Program("x = bytearray(300 << 20)"), Limits(memory_bytes=512 << 20))
        assert large.status is S.OK and large.enforced == small.enforced
    finally:
        sandbox.close()


def test_a_group_that_cannot_be_made_is_not_said_to_enforce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rollbook.sandbox.cgroups.ROOT", tmp_path)
    groups = Groups(0)
    groups.limit(1 << 20, 4)
    assert groups.enforced == () and groups.counts() == (0, 0)


def test_an_owner_that_ends_an_overdue_job_does_not_blame_the_program() -> None:
    cut = Report(ready=True, wait_status=9, killed="asked")
    assert status_of(cut, LIMITS, False, False, overdue=True)[0] is S.INFRA_LOST
    assert status_of(cut, LIMITS, False, cancelled=True)[0] is S.CANCELLED
    assert status_of(cut, LIMITS, True, False)[0] is S.OUTPUT_LIMIT


def test_a_sandbox_that_something_else_ended_says_nothing_about_the_program() -> None:
    assert status_of(Report(ready=True, wait_status=9, lost=True), LIMITS, False, False)[0] is S.INFRA_LOST
    assert status_of(Report(ready=True, wait_status=9, lost=True, oom=True), LIMITS, False, False)[0] is S.OOM
    assert status_of(Report(ready=True, wait_status=9), LIMITS, False, False)[0] is S.CRASHED
    by_limit = Report(ready=True, wait_status=9, cpu_s=LIMITS.cpu_s)
    assert status_of(by_limit, LIMITS, False, False)[0] is S.TIMEOUT_CPU, "the kernel's own limit on processor time"


def test_modules_of_the_standard_library_that_no_zygote_has_imported_are_there(containing: Sandbox) -> None:
    ended = containing.run(Program("import csv, mailbox, sqlite3, wave, xml.dom.minidom\nprint(1)"), LIMITS)
    assert (ended.status, ended.stdout) == (S.OK, b"1\n"), ended


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one of zygote, bubblewrap, landlock, unsafe"):
        make_backend("docker", 1)
    for slots in (0, 65):
        with pytest.raises(ConfigError, match="1 to 64"):
            make_backend("zygote", slots)


def test_ordinary_programs_copy_files_and_wait_for_tasks_behind_the_filter(containing: Sandbox) -> None:
    source = (
        "import asyncio, os, pathlib, shutil, socket, subprocess, tempfile, zipfile\n"
        "open('a', 'w').write('text'); shutil.copy('a', 'b'); shutil.copy2('a', 'c'); pathlib.Path('a').touch()\n"
        "os.makedirs('d/e'); shutil.copytree('d', 'f'); shutil.move('b', 'd/e/b'); os.chmod('a', 0o600)\n"
        "with zipfile.ZipFile('z', 'w') as z: z.write('a')\n"
        "with zipfile.ZipFile('z') as z: z.extractall('out')\n"
        "with tempfile.TemporaryDirectory(dir='.') as t: open(t + '/x', 'w').close()\n"
        "one, other = socket.socketpair(); one.send(b'x'); assert other.recv(1) == b'x'\n"
        "async def main(): return await asyncio.gather(asyncio.sleep(0, 1), asyncio.to_thread(int, '2'))\n"
        "os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "print(asyncio.run(main()), open('out/a').read(), open('d/e/b').read())"
    )
    ended = containing.run(Program(source), Limits(cpu_s=5, wall_s=20))
    assert (ended.status, ended.stdout) == (S.OK, b"[1, 2] text text\n"), ended


WAYS = ("os.killpg(0, {})", "os.kill(-1, {})", "os.kill(os.getppid(), {})")


def test_no_signal_makes_a_programs_end_the_infrastructures(containing: Sandbox) -> None:
    all_of = "import os, time\nfor n in range(1, 65):\n  try: {}\n  except OSError: pass\ntime.sleep(0.1)\nprint(1)"
    for way in WAYS[1:]:
        ended = containing.run(Program(all_of.format(way.format("n"))), LIMITS)
        assert (ended.status, ended.stdout) == (S.OK, b"1\n"), (way, ended)
    to_all = [Program(f"import os, time\n{WAYS[0].format(n)}\ntime.sleep(0.02)") for n in range(1, 65)]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda program: containing.run(program, Limits(cpu_s=0.5, wall_s=0.5)), to_all))
    assert not [(n, e) for n, e in enumerate(ends, 1) if e.blame is Blame.INFRA]


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs unprivileged: the tests above are this one")
@pytest.mark.parametrize("name", ["zygote", "landlock"])
def test_no_signal_reaches_the_watcher_of_an_unprivileged_user(name: str) -> None:
    code = (
        "import json\nfrom rollbook.sandbox.backends import make_backend\nfrom rollbook.core.sandboxing import *\n"
        f"s = make_backend({name!r}, 1)\n"
        "e = [s.run(Program('import os\\ntry: ' + way.format(n) + '\\nexcept OSError: pass'), Limits(cpu_s=0.5, wall_s=0.5))"
        f" for way in {WAYS!r} for n in (1, 2, 9, 15)]\n"
        "print(json.dumps([x.blame for x in e]))\ns.close()"
    )
    command = ["setpriv", "--reuid=61234", "--regid=61234", "--clear-groups", "--inh-caps=-all", "--no-new-privs"]
    done = subprocess.run(
        [*command, zygotes.interpreter("landlock"), "-c", code],
        env={"PYTHONPATH": str(Path(zygotes.__file__).parents[2]), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads(done.stdout)) == 12 and "infra" not in json.loads(done.stdout)


ODD = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff) \\n', 0, 0, 0)\ntime.sleep(0.3)\nprint(1)"


def test_a_name_that_is_no_text_changes_nothing_for_its_job_or_the_next(containing: Sandbox) -> None:
    ended = [containing.run(Program(source), LIMITS) for source in (ODD, "print(1)")]
    assert [(e.status, e.stdout) for e in ended] == [(S.OK, b"1\n")] * 2, ended


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_watcher_that_fails_leaves_no_job_and_the_next_one_runs(name: str, tmp_path: Path) -> None:
    package = tmp_path / "rollbook"
    shutil.copytree(Path(zygotes.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    watch, measured = package / "sandbox" / "watch.py", "used = meter.read()\n"
    broken = watch.read_text().replace(measured, f"{measured}        61 - limits['wall_s'] or 1 / 0\n", 1)
    watch.write_text(broken)
    code = (
        "import json, os\nfrom rollbook.sandbox.backends import make_backend\nfrom rollbook.core.sandboxing import *\n"
        f"from rollbook.sandbox.attacks.bait import look\ns = make_backend({name!r}, 1)\n"
        "source = 'import ctypes, os, time\\nctypes.CDLL(None).prctl(15, b\"rbwatcherless\", 0, 0, 0)\\n"
        "if os.fork() == 0: os.setsid()\\ntime.sleep(60)'\n"
        "e, n = s.run(Program(source), Limits(wall_s=61)), len(look('rbwatcherless'))\n"
        "again = s.run(Program(''), Limits())\ns.close()\n"
        "print(json.dumps([e.status, e.reason[-60:], n, again.status, os.listdir(os.environ['TMPDIR'])]))"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for folder in (scratch, tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "TMPDIR": str(scratch)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    status, reason, running, again, left = json.loads(done.stdout)
    assert status == "infra_spawn" and "ZeroDivisionError" in reason, "what was broken on purpose"
    assert (running, again, left) == (0, "ok", [])


SHORT = (
    "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nend = time.time() + 6\nwhile time.time() < end:\n"
    "  try:\n    if os.fork() == 0:\n      t = time.time()\n      while time.time() - t < 0.02: pass\n      os._exit(0)\n"
    "  except OSError: time.sleep(0.001)"
)


@pytest.mark.parametrize("name", NAMES[:2])
def test_where_a_group_counts_processor_time_no_child_is_too_short_to_count(name: str) -> None:
    sandbox = make_backend(name, 1)
    try:
        ended = sandbox.run(Program(SHORT), Limits(cpu_s=0.7, wall_s=20, processes=8))
        after = sandbox.run(Program("print(1)"), LIMITS)
    finally:
        sandbox.close()
    if "cpu:cgroup" not in ended.enforced:
        pytest.skip("no control groups here")
    assert ended.status is S.TIMEOUT_CPU and after.status is S.OK and after.cpu_s < 0.5, "the jobs before do not count"


def test_what_polling_does_not_bound_is_said(containing: Sandbox) -> None:
    enforced = containing.run(Program("print(1)"), LIMITS).enforced
    assert ("memory:polled" in enforced) is ("memory:cgroup" in enforced)
    assert ("memory:polled (not shared)" in enforced) is ("memory:cgroup" not in enforced)


def test_a_machine_whose_calls_are_unknown_is_refused() -> None:
    with pytest.raises(OSError, match="riscv64"):
        filter_program("riscv64")
