"""Jobs in real sandboxes: how each way to end is told, what bounds them, and that nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollbook.core.errors import ConfigError, RollbookError, Unavailable
from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Execution, Limits, Program, Sandbox, blame_of
from rollbook.observe import failpoints
from rollbook.sandbox import zygote as zygotes
from rollbook.sandbox.backends import make_backend
from rollbook.sandbox.outcome import Report, status_of
from rollbook.sandbox.retry import run_with_retries

S = SandboxStatus
LIMITS = Limits(cpu_s=0.5, wall_s=4.0, memory_bytes=128 << 20, processes=8, output_bytes=100_000, disk_bytes=8 << 20)
SERVICE = Path(__file__).parents[2] / "service"

ENDINGS = {
    "ok": ("print(1 + 1)", S.OK),
    "raises": ("1 / 0", S.RUNTIME_ERROR),
    "an exception that cannot be shown": ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", S.RUNTIME_ERROR),
    "no program": ("def f(:", S.SYNTAX_ERROR),
    "a syntax error of its own making": ("exec('def f(:')", S.RUNTIME_ERROR),
    "os._exit": ("import os; os._exit(0)", S.EARLY_EXIT),
    "sys.exit": ("import sys; sys.exit(0)", S.EARLY_EXIT),
    "endless loop": ("while True: pass", S.TIMEOUT_CPU),
    "loop that ignores every signal": (
        "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "while True: pass",
        S.TIMEOUT_CPU,
    ),
    "processor time of many": (
        "import os, time\nfor i in range(4):\n  if os.fork() == 0:\n    while True: pass\ntime.sleep(30)",
        S.TIMEOUT_CPU,
    ),
    "sleep": ("import time; time.sleep(30)", S.TIMEOUT_WALL),
    "one large object": ("x = bytearray(1 << 30)", S.OOM),
    "memory of many processes": (
        "import os, time\nfor i in range(6):\n  if os.fork() == 0:\n    a = bytearray(60 << 20); time.sleep(20)\ntime.sleep(20)",
        S.OOM,
    ),
    "much output": ("print('x' * 200_000)", S.OUTPUT_LIMIT),
    "much output on standard error": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", S.OUTPUT_LIMIT),
    "one large file": ("open('a', 'wb').write(b'x' * (16 << 20))", S.DISK_LIMIT),
    "many files": ("for i in range(100): open(str(i), 'wb').write(b'x' * 1_000_000)", S.DISK_LIMIT),
    "many processes": ("import os, time\nfor i in range(20):\n  if os.fork() == 0: time.sleep(20)", S.PROCESS_LIMIT),
    "many threads": (
        "import threading, time\nfor i in range(20): threading.Thread(target=time.sleep, args=(20,), daemon=True).start()",
        S.RUNTIME_ERROR,
    ),
    "killed by itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", S.CRASHED),
    "recursion": ("def f(): return f()\nf()", S.RUNTIME_ERROR),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_each_way_to_end_has_its_status(zygote: Sandbox, name: str) -> None:
    source, expected = ENDINGS[name]
    ended = zygote.run(Program(source), LIMITS)
    assert ended.status is expected, ended
    assert ended.blame is blame_of(expected, ended.cpu_s, ended.wall_s)
    assert ended.reason or expected is S.OK
    if expected is not S.TIMEOUT_WALL:
        assert ended.blame in (None, Blame.MODEL)
    else:
        assert ended.blame is Blame.UNCLEAR, "it used no processor: the host may have been busy"


def test_a_timeout_that_used_its_time_is_the_models() -> None:
    assert blame_of(S.TIMEOUT_WALL, cpu_s=1.0, wall_s=2.0) is Blame.MODEL
    assert blame_of(S.TIMEOUT_WALL, cpu_s=0.99, wall_s=2.0) is Blame.UNCLEAR


def test_what_fails_before_the_ready_byte_is_the_infrastructures(zygote: Sandbox) -> None:
    ended = zygote.run(Program("print(1)", setup="raise RuntimeError('no such library')"), LIMITS)
    assert (ended.status, ended.blame) == (S.INFRA_SETUP, Blame.INFRA) and b"no such library" in ended.stderr
    assert ended.stdout == b"", "the program did not begin"


def test_a_claim_from_inside_never_blames_the_infrastructure() -> None:
    for claim in ('{"end": "infra_lost"}', '{"end": "cancelled"}', "{}", "[]", "R", '{"end": null}', "9" * 5000):
        status, _ = status_of(Report(ready=True, claim=claim, wait_status=0), LIMITS, False, False)
        assert blame_of(status) is Blame.MODEL, claim
    forged = "import os; os.write(4, b'{\"end\": \"ok\"}'); os._exit(0)"
    assert status_of(Report(ready=True, claim='{"end": "ok"}', wait_status=9), LIMITS, False, False)[0] is S.CRASHED
    assert forged  # whoever forges "ok" has ended without an error, which is no verdict


def test_answers_come_line_by_line_while_it_runs(zygote: Sandbox) -> None:
    setup = "import sys\ndef serve(ns, answer):\n  for line in sys.stdin: answer(str(ns['f'](int(line))).encode())"
    job = zygote.start(Program("def f(x):\n  print('noise')\n  return x * 2", setup), LIMITS)
    for number in (1, 21, 1000):
        job.send(f"{number}\n".encode())
        assert job.read_line(2.0) == str(2 * number).encode()
    ended = job.wait()
    assert ended.status is S.OK and ended.stdout == b"noise\n" * 3 and ended.answers == b""
    assert job.wait() is ended and job.read_line(0.1) is None
    job.send(b"too late\n")


def test_files_lie_in_the_scratch_space_and_nothing_of_the_machine_is_there(zygote: Sandbox) -> None:
    source = (
        "import json, os\n"
        "print(json.dumps([open('in.txt').read(), os.getcwd(), sorted(os.listdir('/')), os.getuid(), os.listdir('.'),"
        " sorted(os.environ), os.uname().nodename]))"
    )
    ended = zygote.run(Program(source, files={"in.txt": b"hello"}), LIMITS)
    text, cwd, root, uid, files, environ, name = json.loads(ended.stdout)
    assert (text, cwd, uid, files, name) == ("hello", "/work", 1000, ["in.txt"], "sandbox")
    assert not {"etc", "home", "proc", "sys", "var", "run"} & set(root)
    assert set(environ) <= {"PYTHONHASHSEED", "PATH", "LANG", "LC_CTYPE"}
    assert {"netns", "userns", "pidns", "seccomp", "uid"} <= set(ended.enforced)


def test_two_hash_seeds_show_what_depends_on_hashing(zygote: Sandbox) -> None:
    source = "print(list({'alpha', 'beta', 'gamma', 'delta', 'epsilon'}))"
    first, again, other = (zygote.run(Program(source, hash_seed=seed), LIMITS).stdout for seed in (0, 0, 1))
    assert first == again and first != other


def test_a_job_that_is_killed_is_cancelled_and_one_that_has_ended_is_not(zygote: Sandbox) -> None:
    job = zygote.start(Program("import time; time.sleep(30)"), Limits(wall_s=60))
    threading.Timer(0.2, job.kill).start()
    ended = job.wait()
    assert (ended.status, ended.blame) == (S.CANCELLED, Blame.INFRA) and ended.wall_s < 30
    done = zygote.start(Program("print(1)"), LIMITS)
    assert done.wait().status is S.OK
    done.kill()
    assert done.wait().status is S.OK


def test_jobs_run_side_by_side_and_do_not_meet(zygote: Sandbox) -> None:
    source = "import os, time\nopen('mine', 'w').write('x'); time.sleep(0.3); print(os.listdir('.'), os.getpid())"
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda _: zygote.run(Program(source), LIMITS), range(12)))
    assert {e.stdout for e in ended} == {b"['mine'] 2\n"}, "each is alone in its pid namespace and scratch space"


def children() -> set[int]:
    return {int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def groups() -> list[str]:
    found = Path("/sys/fs/cgroup").glob("**/rollbook-sandbox/*") if os.geteuid() == 0 else ()
    return sorted(path.name for path in found if path.is_dir())


def test_nothing_is_left_behind() -> None:
    def left() -> tuple[object, ...]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(Path("/proc/mounts").read_text().splitlines())

    before, born, made = left(), children(), groups()
    sandbox = make_backend("zygote", 4)
    outlives = "import os\nif os.fork() == 0:\n  os.setsid()\n  import time; time.sleep(30)"
    sources = ["print(1)", outlives, "import os; os._exit(1)", "1/0"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: sandbox.run(Program(sources[i % 4]), LIMITS), range(100)))
    zygote_pid = sandbox.zygote_pid()
    assert wait_for(lambda: below(zygote_pid) == []), "watchers are reaped"
    sandbox.close()
    assert not Path(f"/proc/{zygote_pid}").exists()
    assert wait_for(lambda: left() == before and children() == born and set(groups()) <= set(made)), (before, left(), groups())


def wait_for(true: Callable[[], bool], bound_s: float = 10.0) -> bool:
    until = time.monotonic() + bound_s
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize(
    ("interpreter", "kind"), [("kill -9 $$", Unavailable), ("exit 3", ConfigError), ("echo wrong >&2; kill -SYS $$", ConfigError)]
)
def test_only_a_zygote_that_ended_by_itself_cannot_work_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str, kind: type[RollbookError]
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{interpreter}\n")
    script.chmod(0o755)
    monkeypatch.setattr(zygotes, "interpreter", lambda mode: str(script))
    with pytest.raises(kind, match="sandbox backend 'zygote' cannot work here: .*it ended at once"):
        make_backend("zygote", 1)


@pytest.mark.parametrize(
    ("trial", "kind"),
    [
        ("import os; os.kill(os.getpid(), 9)", Unavailable),
        ("import os; os.kill(os.getpid(), 31)", ConfigError),
        ("import no_such_library", ConfigError),
    ],
)
def test_only_a_trial_that_failed_by_itself_tells_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, trial: str, kind: type[RollbookError]
) -> None:
    monkeypatch.setattr(zygotes, "_TRIAL", trial)
    with pytest.raises(kind, match="sandbox backend 'landlock' cannot work here"):
        make_backend("landlock", 1)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EMFILE, Unavailable), (errno.ENOMEM, Unavailable), (errno.EPERM, ConfigError)]
)
def test_only_what_stays_refused_cannot_work_here(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[RollbookError]
) -> None:
    def refuse(name: str) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        make_backend("zygote", 1)


def test_a_dead_zygote_costs_no_verdict() -> None:
    sandbox = make_backend("zygote", 2)
    try:
        job = sandbox.start(Program("import time; time.sleep(0.5); print('whole')"), LIMITS)
        os.kill(sandbox.zygote_pid(), signal.SIGKILL)
        ended = job.wait()
        assert ended.status is S.OK and ended.stdout == b"whole\n" or ended.status is S.INFRA_LOST
        assert sandbox.run(Program("print(2)"), LIMITS).stdout == b"2\n"
    finally:
        sandbox.close()


def test_a_watcher_that_dies_takes_its_job_along_and_says_nothing_about_it() -> None:
    sandbox = make_backend("zygote", 1)
    try:
        job = sandbox.start(Program("import time; time.sleep(30)"), Limits(wall_s=60))
        pid = sandbox.zygote_pid()
        assert wait_for(lambda: any(map(below, below(pid))))
        watcher, first = next((watcher, below(watcher)[0]) for watcher in below(pid) if below(watcher))
        os.kill(watcher, signal.SIGKILL)
        ended = job.wait()
        assert (ended.status, ended.blame) == (S.INFRA_LOST, Blame.INFRA)
        assert wait_for(lambda: not Path(f"/proc/{first}").exists() or "Z" in Path(f"/proc/{first}/stat").read_text())
    finally:
        sandbox.close()


def below(pid: int) -> list[int]:
    """Children of a process; none when it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_a_dead_owner_leaves_no_process() -> None:
    code = (
        "import sys, os\nfrom rollbook.sandbox.backends import make_backend\nfrom rollbook.core.sandboxing import *\n"
        "s = make_backend('zygote', 1); j = s.start(Program('import time; time.sleep(60)'), Limits(wall_s=60))\n"
        "print(s.zygote_pid(), flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SERVICE)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    zygote_pid = int(owner.stdout.readline())
    assert wait_for(lambda: bool(below(zygote_pid)))
    watchers = below(zygote_pid)
    owner.kill()
    owner.communicate()
    assert wait_for(lambda: not any(_runs(pid) for pid in (zygote_pid, *watchers)))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs unprivileged: every other test here is this one")
@pytest.mark.parametrize("name", ["zygote", "landlock"])
def test_it_works_for_a_user_without_privileges(name: str) -> None:
    code = (
        "import json\nfrom rollbook.sandbox.backends import make_backend\nfrom rollbook.core.sandboxing import *\n"
        f"s = make_backend({name!r}, 2)\n"
        "e = [s.run(Program(p), Limits(cpu_s=1, memory_bytes=128 << 20)) for p in (\"import os; print(os.getuid())\", "
        "\"x = bytearray(1 << 30)\", \"import socket; socket.socket()\", \"import os, time\\nfor i in range(30):\\n"
        "  if os.fork() == 0: time.sleep(20)\")]\n"
        "print(json.dumps([[x.status, x.stdout.decode(), x.reason] for x in e]))\ns.close()"
    )
    command = ["setpriv", "--reuid=61234", "--regid=61234", "--clear-groups", "--inh-caps=-all", "--no-new-privs"]
    done = subprocess.run(
        [*command, zygotes.interpreter("landlock"), "-c", code], env={"PYTHONPATH": str(SERVICE), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    plain, large, network, crowd = json.loads(done.stdout)
    assert plain[:2] == ["ok", "1000\n" if name == "zygote" else "61234\n"]
    assert [large[0], network[0], crowd[0]] == ["oom", "runtime_error", "process_limit"]


def test_a_slot_that_does_not_come_free_is_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollbook.sandbox.zygote.SLOT_WAIT_S", 0.1)
    sandbox = make_backend("zygote", 1)
    try:
        job = sandbox.start(Program("import time; time.sleep(30)"), Limits(wall_s=60))
        ended = sandbox.run(Program("print(1)"), LIMITS)
        assert (ended.status, ended.blame) == (S.INFRA_OVERLOAD, Blame.INFRA)
        job.kill()
    finally:
        sandbox.close()
    assert sandbox.run(Program("print(1)"), LIMITS).status is S.INFRA_OVERLOAD, "closed"


def test_a_sandbox_that_cannot_be_made_is_a_status_and_not_an_exception(zygote: Sandbox) -> None:
    failpoints.arm("sandbox.before_spawn=raise")
    try:
        ended = zygote.run(Program("print(1)"), LIMITS)
    finally:
        failpoints.arm("")
    assert (ended.status, ended.blame) == (S.INFRA_SPAWN, Blame.INFRA)
    assert zygote.run(Program("print(1)"), LIMITS).status is S.OK


def ended_with(status: SandboxStatus, blame: Blame | None) -> Execution:
    return Execution(status, blame, "")


@pytest.mark.parametrize(
    ("results", "attempts", "status"),
    [
        ([(S.OK, None)], 1, S.OK),
        ([(S.INFRA_LOST, Blame.INFRA), (S.OK, None)], 2, S.OK),
        ([(S.INFRA_LOST, Blame.INFRA)] * 3, 3, S.INFRA_LOST),
        ([(S.TIMEOUT_WALL, Blame.UNCLEAR), (S.OK, None)], 2, S.OK),
        ([(S.TIMEOUT_WALL, Blame.UNCLEAR)] * 2, 2, S.TIMEOUT_WALL),
        ([(S.TIMEOUT_WALL, Blame.MODEL)], 1, S.TIMEOUT_WALL),
        ([(S.RUNTIME_ERROR, Blame.MODEL)], 1, S.RUNTIME_ERROR),
    ],
)
def test_only_what_is_not_the_programs_doing_is_tried_again(results: list, attempts: int, status: SandboxStatus) -> None:
    left = [ended_with(*result) for result in results]
    final = run_with_retries(lambda: left.pop(0), 3, pause_s=0.001)
    assert (final.status, final.attempts, left) == (status, attempts, [])


def test_landlock_contains_without_namespaces(landlock: Sandbox) -> None:
    for source, expected in (
        ("print(1)", S.OK),
        ("open('a', 'w').write('x'); print(open('a').read())", S.OK),
        ("open('/etc/passwd')", S.RUNTIME_ERROR),
        ("open('/tmp/planted', 'w')", S.RUNTIME_ERROR),
        ("import _socket; _socket.socket()", S.RUNTIME_ERROR),
        ("while True: pass", S.TIMEOUT_CPU),
        ("x = bytearray(1 << 30)", S.OOM),
    ):
        assert landlock.run(Program(source), LIMITS).status is expected, source
