"""What was flushed survives a power loss, what was not is lost in some state, and the classic mistakes show."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.disk import PAGE, Disk

SEEDS = range(150)
OLD, NEW = b"old " * 500, b"new " * 700
SHARED_MEMORY = Path("/dev/shm")

State = dict[str, bytes | None]
"""Content by path below the root, None for a directory."""


class Storage:
    """A directory, its disk, and the file operations of a careful or careless program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = Disk(root)

    def write(self, name: str, data: bytes, *, flush: bool = True, mode: str = "wb") -> None:
        path = self.root / name
        self.disk.writing(path)
        with open(path, mode) as file:
            file.write(data)
            file.flush()
            if flush:
                self.disk.fsync(file.fileno(), path)

    def flush(self, name: str = "") -> None:
        """fsync of a file or directory."""
        fd = os.open(self.root / name, os.O_RDONLY)
        try:
            self.disk.fsync(fd, self.root / name)
        finally:
            os.close(fd)

    def rename(self, name: str, target: str) -> None:
        os.replace(self.root / name, self.root / target)

    def mkdir(self, name: str) -> None:
        (self.root / name).mkdir()

    def lose_power(self, seed: int) -> list[str]:
        return self.disk.power_loss(random.Random(seed))

    def state(self) -> State:
        paths = sorted(self.root.rglob("*"))
        return {str(path.relative_to(self.root)): None if path.is_dir() else path.read_bytes() for path in paths}


@contextmanager
def a_storage(before: State | None = None) -> Iterator[Storage]:
    """A disk in memory where there is some, with what stands on it from the start."""
    root = Path(tempfile.mkdtemp(prefix="rollbook-disk-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    for name, content in (before or {}).items():
        (root / name).mkdir() if content is None else (root / name).write_bytes(content)
    storage = Storage(root)
    try:
        yield storage
    finally:
        storage.disk.close()
        shutil.rmtree(root)


def found_after(program: Callable[[Storage], object], before: State | None = None) -> list[State]:
    """What is found after a program and a power loss, once per seed."""
    found = []
    for seed in SEEDS:
        with a_storage(before) as storage:
            program(storage)
            storage.lose_power(seed)
            found.append(storage.state())
    return found


def names(found: list[State]) -> set[tuple[str, ...]]:
    return {tuple(state) for state in found}


def test_what_stood_there_and_what_was_flushed_with_all_its_directories_survives() -> None:
    def program(s: Storage) -> None:
        s.mkdir("made")
        s.flush()
        s.write("made/file", NEW)
        s.flush("made")

    assert all(state == {"kept": OLD, "made": None, "made/file": NEW} for state in found_after(program, {"kept": OLD}))


def test_a_flushed_file_vanishes_in_some_state_when_its_directory_was_not_flushed() -> None:
    found = found_after(lambda s: s.write("file", NEW))
    assert names(found) == {(), ("file",)}
    assert {state["file"] for state in found if state} == {NEW}, "its content was flushed"


def test_a_directory_its_parent_was_not_flushed_for_vanishes_with_all_that_was_flushed_in_it() -> None:
    def program(s: Storage) -> None:
        s.mkdir("made")
        s.write("made/file", NEW)
        s.flush("made")

    assert names(found_after(program)) == {(), ("made", "made/file")}


def test_a_file_never_flushed_is_found_empty_torn_with_holes_and_whole() -> None:
    def program(s: Storage) -> None:
        s.write("file", NEW, flush=False)
        s.flush()

    contents = [state["file"] or b"" for state in found_after(program)]
    assert {b"", NEW} <= set(contents)
    assert any(NEW.startswith(c) and 0 < len(c) < len(NEW) for c in contents), "torn"
    assert any(len(c) == len(NEW) and c != NEW for c in contents), "holes"


def test_a_rename_over_a_file_shows_one_of_the_two_never_neither_and_its_directory_decides() -> None:
    def careless(s: Storage) -> None:
        s.write("file.tmp", NEW)
        s.rename("file.tmp", "file")

    def careful(s: Storage) -> None:
        careless(s)
        s.flush()

    found = found_after(careless, {"file": OLD})
    assert {(s["file"], s.get("file.tmp")) for s in found} == {(OLD, None), (OLD, NEW), (NEW, None)}
    assert all(state == {"file": NEW} for state in found_after(careful, {"file": OLD}))


def test_a_file_renamed_before_it_was_flushed_is_found_empty_under_its_final_name() -> None:
    def careless(s: Storage) -> None:
        s.write("file.tmp", NEW, flush=False)
        s.rename("file.tmp", "file")
        s.flush()

    contents = {state["file"] for state in found_after(careless, {"file": OLD})}
    assert b"" in contents and NEW in contents and OLD not in contents


def test_a_directory_filled_flushed_and_renamed_is_found_under_one_name_or_not_at_all() -> None:
    def program(s: Storage) -> None:
        s.mkdir("tmp.1")
        s.write("tmp.1/a", NEW)
        s.write("tmp.1/b", OLD)
        s.flush("tmp.1")
        s.rename("tmp.1", "1")

    whole = {"a": NEW, "b": OLD}
    found = found_after(program)
    assert names(found) == {(), ("1", "1/a", "1/b"), ("tmp.1", "tmp.1/a", "tmp.1/b")}
    assert all({n.partition("/")[2]: c for n, c in state.items() if c} in ({}, whole) for state in found)


def test_an_appended_tail_endangers_only_itself() -> None:
    def program(s: Storage) -> None:
        s.write("file", OLD)
        s.flush()
        s.write("file", NEW, mode="ab", flush=False)

    contents = {state["file"] or b"" for state in found_after(program)}
    assert all(content.startswith(OLD) for content in contents)
    assert {OLD, OLD + NEW} < contents


def test_a_file_overwritten_and_not_flushed_holds_the_old_the_new_or_part_of_it() -> None:
    contents = {state["file"] for state in found_after(lambda s: s.write("file", NEW, flush=False), {"file": OLD})}
    assert {OLD, NEW} < contents


def test_what_was_removed_reappears_in_some_state_until_its_directory_is_flushed() -> None:
    before: State = {"tree": None, "tree/a": OLD, "tree/b": OLD, "tree/c": OLD}

    def careless(s: Storage) -> None:
        shutil.rmtree(s.root / "tree")

    def careful(s: Storage) -> None:
        careless(s)
        s.flush()

    found = names(found_after(careless, before))
    assert {(), ("tree",), ("tree", "tree/a", "tree/b", "tree/c")} < found
    assert any(1 < len(state) < 4 for state in found), "part of it"
    assert names(found_after(careful, before)) == {()}


def test_an_inode_whose_number_could_be_used_again_is_not_taken_for_another() -> None:
    def program(s: Storage) -> None:
        os.unlink(s.root / "first")
        s.write("second", NEW)

    assert names(found_after(program, {"first": OLD})) == {("first",), ("second",), ("first", "second"), ()}


def test_after_a_power_loss_what_was_found_is_durable() -> None:
    for seed in SEEDS:
        with a_storage({"file": OLD, "gone": OLD}) as s:
            s.write("file", NEW, flush=False)
            s.write("other", NEW)
            os.unlink(s.root / "gone")
            s.lose_power(seed)
            found = s.state()
            s.lose_power(seed + 1)
            assert s.state() == found


def test_one_seed_makes_one_state_and_one_log() -> None:
    def once(seed: int) -> tuple[list[str], State]:
        with a_storage({"a": OLD, "b": OLD, "d": None}) as s:
            for name in ("a", "d/x", "d/y", "z"):
                s.write(name, NEW, flush=name > "d/x")
            s.rename("b", "c")
            os.unlink(s.root / "d/y")
            return s.lose_power(seed), s.state()

    results = [once(seed) for seed in range(30)]
    assert results == [once(seed) for seed in range(30)]
    assert len({str(log) for log, _ in results}) > 10


def test_what_is_excluded_and_the_directories_that_lead_to_it_are_left_alone() -> None:
    for seed in SEEDS:
        with a_storage() as s:
            s.disk.exclude(s.root / "run/database*")
            s.mkdir("run")
            s.write("run/database", NEW, flush=False)
            s.write("run/database-wal", NEW, flush=False)
            s.write("run/other", NEW, flush=False)
            s.lose_power(seed)
            state = s.state()
            assert state.pop("run/other", b"") is not None
            assert state == {"run": None, "run/database": NEW, "run/database-wal": NEW}


def test_faults_hit_the_named_files_once_or_until_cleared_and_name_them() -> None:
    with a_storage({"d": None}) as s:
        s.disk.fail_next("write", errno.ENOSPC, "d/*")
        s.write("other", NEW)
        with pytest.raises(OSError) as caught:
            s.write("d/file", NEW)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(s.root / "d/file"))
        s.write("d/file", NEW)
        s.disk.fail_next("fsync", errno.EIO, times=None)
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output error"):
                s.flush("d")
        s.disk.clear()
        s.flush("d")
        s.disk.full(True)
        with pytest.raises(OSError, match="No space left"):
            s.write("d/more", NEW)
        s.disk.full(False)
        s.write("d/more", NEW)


def test_what_a_failed_flush_lost_is_not_durable_after_a_later_one_but_what_was_written_since_is() -> None:
    first, second = b"1" * PAGE, b"2" * PAGE

    def program(s: Storage) -> None:
        s.write("file", OLD)
        s.flush()
        s.disk.fail_next("fsync", errno.EIO, "file")
        with pytest.raises(OSError):
            s.write("file", first)
        s.write("file", second, mode="ab")

    contents = {state["file"] for state in found_after(program)}
    assert first + second in contents
    assert OLD + bytes(PAGE - len(OLD)) + second in contents

    def anew(s: Storage) -> None:
        program(s)
        os.unlink(s.root / "file")
        s.write("file", first + second)
        s.flush()

    assert {state["file"] for state in found_after(anew)} == {first + second}, "a new file has lost nothing"


def test_descriptors_do_not_pile_up_with_files_that_come_and_go() -> None:
    with a_storage({"d": None}) as s:
        for i in range(1500):
            s.write(f"d/{i}", b"x")
            if i % 2:
                s.flush("d")
            os.unlink(s.root / f"d/{i}")
        assert len(s.disk._inodes) < 1000


Operation = tuple[str, str, str]
_NAMES = st.sampled_from(["a", "b", "c", "d/a", "d/b", "d/c"])
_OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["write", "append", "flush", "flush directory", "rename", "remove"]), _NAMES, _NAMES), max_size=25
)


class Expectation:
    """What must be found, kept in names and contents only: the disk's inodes are not asked."""

    def __init__(self) -> None:
        self.now: dict[str, list[bytes]] = {}
        """Content by name, in a box that moves with a rename."""
        self.flushed: dict[int, bytes] = {}
        self.boxes: list[list[bytes]] = []
        self.names_sure: dict[str, list[bytes]] = {}
        """Names flushed with their directory and not touched since."""
        self.kept: dict[str, list[list[bytes]]] = {"": [], "d": []}
        """Files that a flushed directory listed and that were never removed or replaced since: found under some name."""

    def touch(self, name: str) -> None:
        self.names_sure.pop(name, None)

    def drop(self, name: str) -> None:
        box = self.now.pop(name, None)
        self.touch(name)
        for files in self.kept.values():
            files[:] = [file for file in files if file is not box]

    def check(self, state: State) -> None:
        contents = [content for content in state.values() if content is not None]
        for name, box in self.names_sure.items():
            assert name in state, f"{name} was flushed with its directory"
            if self.flushed.get(id(box)) == box[0]:
                assert state[name] == box[0], f"{name} was flushed"
        for directory, files in self.kept.items():
            here = [content for name, content in state.items() if content is not None and name.rpartition("/")[0] == directory]
            for box in files:
                if self.flushed.get(id(box)) == box[0]:
                    assert here.count(box[0]) == 1, "renamed: under one name"
        whole = [box[0] for box in self.boxes if self.flushed.get(id(box)) == box[0]]
        assert all(contents.count(content) <= 1 for content in whole), "never under two names"


def play(s: Storage, operations: list[Operation]) -> Expectation:
    """Do what a program might, and know what must come of it. Every content is another one."""
    model = Expectation()
    for i, (kind, name, other) in enumerate(operations):
        directory = name.rpartition("/")[0]
        unique = f"{i}".encode() * 300
        if kind == "write" and name not in model.now:
            s.write(name, unique, flush=False)
            model.now[name] = box = [unique]
            model.boxes.append(box)
        elif kind == "append" and name in model.now:
            s.write(name, unique, flush=False, mode="ab")
            model.now[name][0] += unique
        elif kind == "flush" and name in model.now:
            s.flush(name)
            model.flushed[id(model.now[name])] = model.now[name][0]
        elif kind == "flush directory":
            s.flush(directory)
            here = {n: box for n, box in model.now.items() if n.rpartition("/")[0] == directory}
            model.names_sure |= here
            model.kept[directory] = list(here.values())
        elif kind == "rename" and name in model.now and other != name and other.rpartition("/")[0] == directory:
            s.rename(name, other)
            box = model.now.pop(name)
            model.drop(other)
            model.touch(name)
            model.now[other] = box
        elif kind == "remove" and name in model.now:
            os.unlink(s.root / name)
            model.drop(name)
    return model


@settings(max_examples=400, deadline=None, derandomize=True)
@given(_OPERATIONS, st.integers(0, 10_000))
def test_whatever_a_program_does_its_flushed_names_and_contents_are_found(operations: list[Operation], seed: int) -> None:
    with a_storage({"d": None}) as s:
        model = play(s, operations)
        s.lose_power(seed)
        model.check(s.state())
