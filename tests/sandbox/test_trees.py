"""Trees that a program left: deeper than Python recurses, deeper than a path can name, unreadable, or changing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rollbook.core.records import Blame, SandboxStatus
from rollbook.core.sandboxing import Limits, Program
from rollbook.sandbox.backends import make_backend
from rollbook.sandbox.trees import DEPTH_MAX, directories, remove, size_of

DEEP = "import os\nfor _ in range({depth}):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)\nopen('leaf', 'w').write('x')"


def deepen(top: Path, depth: int) -> None:
    """A chain of directories, made as no path could name it."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(top)
        exec(DEEP.format(depth=depth), {})
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
    assert (size_of(str(top)) == sys.maxsize) == (depth > DEPTH_MAX) and size_of(str(top)) >= 5000
    remove(str(top))
    assert not top.exists() and Path("/etc").is_dir()


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    remove(missing)
    assert list(directories(missing)) == [] and size_of(missing) == 0


@pytest.mark.parametrize("name", ["landlock", "zygote", "bubblewrap"])
def test_a_job_that_makes_a_deep_tree_is_blamed_for_it_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    sandbox = make_backend(name, 2)
    try:
        ended = sandbox.run(Program(DEEP.format(depth=1500) + "\nimport time; time.sleep(3)"), Limits(disk_bytes=8 << 20))
    finally:
        sandbox.close()
    ends = (SandboxStatus.DISK_LIMIT,) if name == "landlock" else (SandboxStatus.DISK_LIMIT, SandboxStatus.OK)
    assert ended.status in ends and ended.blame is not Blame.INFRA
    assert not [left for left in set(os.listdir("/tmp")) - before if left.startswith("rollbook-job")]
