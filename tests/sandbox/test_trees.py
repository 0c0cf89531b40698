"""Trees that a program left: deeper than Python recurses, deeper than a path can name, unreadable, or changing."""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Program
from rollbook.sandbox import trees
from rollbook.sandbox.backends import make_backend
from rollbook.sandbox.trees import DEPTH_MAX, ENTRIES_MAX, directories, remove, size_of
from rollbook.sandbox.unlinked import Unlinked
from rollbook.sandbox.zygote import interpreter
from rollbook.sandbox.zygote_main import make_scratch

DEEP = "import os\nfor _ in range({depth}):\n    os.mkdir({name!r})\n    os.chdir({name!r})\nopen('leaf', 'w').write('x')"


def deepen(top: Path, depth: int, name: str = "d" * 9) -> None:
    """A chain of directories, made as no path could name it."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(top)
        exec(DEEP.format(depth=depth, name=name), {})
    finally:
        os.fchdir(here)
        os.close(here)


@pytest.mark.parametrize("depth", [3, 1500])
def test_a_tree_of_any_depth_is_looked_through_and_removed(tmp_path: Path, depth: int) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "file").write_bytes(b"x" * 5000)
    (top / "link").symlink_to("/etc")
    (top / "shut").mkdir(mode=0)
    deepen(top, depth)
    seen = list(directories(str(top)))
    assert sum(1 for _ in seen) > min(depth, 300) and not any("/etc" in directory for directory, _ in seen)
    assert (size_of(str(top)) == sys.maxsize) == (depth > DEPTH_MAX or os.geteuid() != 0) and size_of(str(top)) >= 5000
    remove(str(top))
    assert not top.exists() and Path("/etc").is_dir()


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    remove(missing)
    assert list(directories(missing)) == [] and size_of(missing) == 0


def test_names_that_a_removal_could_choose_are_removed_too(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / ".0.removed" / "x").mkdir(parents=True)
    (top / ".1.removed" / ".0.removed" / ".1.removed").mkdir(parents=True)
    remove(str(top))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    ["os.mkdir('a'); os.mkdir('a/b', 0o500)", "os.mkdir('a'); open('a/f', 'w'); os.chmod('a', 0)"],
    ids=["read-only", "shut"],
)
def test_who_is_nobody_removes_what_its_owner_may_not_write(make: str) -> None:
    with tempfile.TemporaryDirectory(prefix="trees-") as parent:
        os.chmod(parent, 0o777)
        source = f"import os, sys\nfrom rollbook.sandbox.trees import remove\nos.mkdir('top'); os.chdir('top')\n{make}\n"
        nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(
            [interpreter("landlock"), "-c", source + "remove(sys.argv[1])", f"{parent}/top"], cwd=parent, capture_output=True,
            text=True, timeout=60, env={"PYTHONPATH": str(Path(trees.__file__).parents[2])}, **nobody,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert os.listdir(parent) == []


def test_what_links_lead_to_is_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "file").write_text("x")
    outside.chmod(0o555)
    (tmp_path / "top" / "d").mkdir(parents=True)
    for link in ("top/link", "top/d/link", "itself"):
        (tmp_path / link).symlink_to(outside)
    remove(str(tmp_path / "top"))
    remove(str(tmp_path / "itself"))
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "itself"}
    assert {path.name for path in outside.iterdir()} == {"inner", "file"} and outside.stat().st_mode & 0o777 == 0o555


def test_a_directory_that_becomes_a_link_meanwhile_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (tmp_path / "top" / "d").mkdir(parents=True)
    unlinked = trees._unlinked

    def change(name: str, parent: int) -> bool:
        done = unlinked(name, parent)
        if name == "d" and not done:
            (tmp_path / "top" / "d").rmdir()
            (tmp_path / "top" / "d").symlink_to(outside)
        return done

    monkeypatch.setattr(trees, "_unlinked", change)
    remove(str(tmp_path / "top"))
    assert (outside / "inner").is_dir()


def test_a_tree_that_somebody_keeps_filling_is_left_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "REMOVE_S", 0.3)
    top = tmp_path / "top"
    top.mkdir()
    (top / "0").touch()
    unlinked, numbers = trees._unlinked, itertools.count(1)

    def fill(name: str, parent: int) -> bool:
        (top / str(next(numbers))).touch()
        return unlinked(name, parent)

    monkeypatch.setattr(trees, "_unlinked", fill)
    before = time.monotonic()
    remove(str(top))
    assert 0.2 < time.monotonic() - before < 10 and top.exists()


@pytest.mark.parametrize("name", ["landlock", "zygote", "bubblewrap"])
def test_a_job_that_makes_a_deep_tree_is_blamed_for_it_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    sandbox = make_backend(name, 2)
    try:
        source = DEEP.format(depth=1500, name="d" * 9) + "\nimport time; time.sleep(3)"
        ended = sandbox.run(Program(source), Limits(disk_bytes=8 << 20))
    finally:
        sandbox.close()
    ends = (SandboxStatus.DISK_LIMIT,) if name == "landlock" else (SandboxStatus.DISK_LIMIT, SandboxStatus.OK)
    assert ended.status in ends and ended.blame is not Blame.INFRA
    assert not [left for left in set(os.listdir("/tmp")) - before if left.startswith("rollbook-job")]


@pytest.mark.parametrize("name", ["many", "long names"])
def test_a_tree_with_more_entries_than_anybody_needs_or_paths_that_no_call_takes_is_over_every_limit(
    tmp_path: Path, name: str
) -> None:
    top = tmp_path / "top"
    top.mkdir()
    if name == "many":
        for i in range(ENTRIES_MAX):
            (top / str(i)).touch()
        assert size_of(str(top)) < sys.maxsize
        (top / "one more").touch()
    else:
        deepen(top, 20, "n" * 255)
    assert size_of(str(top)) == sys.maxsize
    remove(str(top))
    assert not top.exists()


HIDING = {
    "open files without a name": (
        "import os, time\nheld = []\nfor i in range(6):\n  held.append(os.open('f', os.O_CREAT | os.O_RDWR)); os.unlink('f')\n"
        "  os.write(held[-1], b'x' * (2 << 20))\ntime.sleep(2)"
    ),
    # CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_VFORK: whoever made the thread, and shares its state with it, waits.
    "a thread's own descriptors": (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nstack = ctypes.create_string_buffer(1 << 20)\n"
        "@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)\ndef hold(_):\n  held = []\n  for i in range(6):\n"
        "    held.append(os.open('f', os.O_CREAT | os.O_RDWR)); os.unlink('f'); os.write(held[-1], b'x' * (2 << 20))\n"
        "  time.sleep(2); os._exit(0)\n"
        "libc.clone(hold, ctypes.c_void_p(ctypes.addressof(stack) + (1 << 20)), 0x14900, None)\ntime.sleep(2)"
    ),
    "mappings of files that nobody has open": (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\nfor i in range(6):\n"
        "  fd = os.open('f', os.O_CREAT | os.O_RDWR); os.write(fd, b'x' * (2 << 20))\n"
        "  libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)); os.unlink('f'); os.close(fd)\ntime.sleep(2)"
    ),
    "an unreadable directory": (
        "import os, time\nos.mkdir('d', 0o300)\nfor i in range(6): open(f'd/{i}', 'wb').write(b'x' * (2 << 20))\ntime.sleep(2)"
    ),
    "its own directory, unreadable": (
        "import os, time\nos.chmod('.', 0o300)\nfor i in range(6): open(f'{i}', 'wb').write(b'x' * (2 << 20))\ntime.sleep(2)"
    ),
    "entries": "import time\nfor i in range(6000): open(str(i), 'w').close()\ntime.sleep(2)",
}
FILES = {
    "a mapping of a file that lost its name": (
        "import mmap, tempfile, time\nf = tempfile.TemporaryFile(dir='.'); f.write(b'x' * 100000); f.flush()\n"
        "m = mmap.mmap(f.fileno(), 0); f.close(); time.sleep(0.4); print(len(m))"
    ),
    "renamed and removed": (
        "import os, time\nend = time.time() + 0.5\nwhile time.time() < end:\n"
        "  with open('f', 'wb') as f: f.write(b'x' * (3 << 20))\n"
        "  os.rename('f', 'g'); os.remove('g')\nprint(100000)"
    ),
    "children that end": (
        "import os, time\nend = time.time() + 0.5\nwhile time.time() < end:\n"
        "  if os.fork() == 0: os._exit(0)\n  os.wait()\nprint(100000)"
    ),
}
_RUN = """
import json, os, sys
from rollbook.sandbox.backends import make_backend
from rollbook.core.sandboxing import *
s = make_backend("landlock", 1)
ended = [s.run(Program(p), Limits(cpu_s=5, wall_s=20, disk_bytes=8 << 20)) for p in json.loads(sys.stdin.read())]
s.close()
print(json.dumps([[e.status, e.blame, e.stdout.decode(), e.reason] for e in ended]))
"""


@functools.cache
def ends_of(user: str) -> dict[str, list[str]]:
    """How each program ends in landlock, by its name."""
    names = [*HIDING, *FILES]
    unprivileged = ["setpriv", "--reuid=61234", "--regid=61234", "--clear-groups", "--inh-caps=-all", "--no-new-privs"]
    command = [] if user == "as it is" else unprivileged
    with tempfile.TemporaryDirectory(prefix="trees-") as scratch:
        os.chmod(scratch, 0o777)
        done = subprocess.run(
            [*command, interpreter("landlock"), "-c", _RUN], input=json.dumps([{**HIDING, **FILES}[name] for name in names]),
            env={"PYTHONPATH": str(Path(trees.__file__).parents[2]), "PATH": os.environ["PATH"], "TMPDIR": scratch},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert os.listdir(scratch) == [], "nothing stays, whatever mode it has"
    return dict(zip(names, json.loads(done.stdout), strict=True))


def test_files_without_a_name_are_found_where_the_scratch_space_lies_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    scratch = make_scratch(0)
    unlinked = Unlinked(scratch)
    assert os.listdir(scratch) == [] and unlinked.occupied([os.getpid()]) == 0
    with tempfile.TemporaryFile(dir=scratch) as file:
        file.write(b"x" * 100_000)
        file.flush()
        assert unlinked.occupied([os.getpid()]) >= 100_000
        with mmap.mmap(file.fileno(), 0):
            assert unlinked._mapped("/proc/self") == {os.fstat(file.fileno()).st_ino}


USERS = ("as it is", "unprivileged") if os.geteuid() == 0 else ("as it is",)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", HIDING)
def test_what_a_job_hides_counts_for_its_disk(name: str, user: str) -> None:
    assert ends_of(user)[name][:2] == ["disk_limit", "model"], ends_of(user)[name]


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", FILES)
def test_what_an_ordinary_program_does_with_its_files_is_not_taken_for_hiding(name: str, user: str) -> None:
    assert ends_of(user)[name][:3] == ["ok", None, "100000\n"], ends_of(user)[name]
