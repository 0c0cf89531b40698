"""A disk that loses power: which files and directories may be found after it, decided by a seed.

Owns what is durable under one real directory, as told by ``fsync`` alone, and rewrites that directory into one legal state
after a power loss. Never announces a write or a rename by itself: renames, removals and new files are read off the directory
when the power goes. Holds no more than the tree's own bytes, and one descriptor per inode, so that no inode number is used
twice while it is remembered.

The model is stricter than any one file system (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014):

* An entry of a directory changes on storage when it likes, and for good when the directory is flushed. Every inode takes
  one of the places it had since then: its old name, a name it was flushed under, its newest name, or nowhere when it was
  new or was removed. A rename within a directory is atomic: old or new name, never both, never neither; the file it
  replaced is there exactly as long as the new one is not.
* Flushing a file says nothing of its entry; flushing a directory says nothing of what is in its files.
* What was written to a file since its last flush is there, or not, or cut short, or has blocks of zeros in it. Bytes
  appended to flushed ones endanger only themselves.
* What a failed flush should have written is lost to later flushes too: the kernel takes those pages for clean
  (the "fsyncgate" of 2018). Only pages that changed since are written by the next one.

Weaker than a real disk: removing a file and creating another of the same name counts as a replacement; a rename across
directories is not atomic; a file of two names comes back as two files; links and special files are left alone.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Literal

BLOCK = 512
PAGE = 4096
SEEN_MAX = 256
"""Names remembered per directory between two flushes of it."""

Fault = Literal["write", "fsync"]


@dataclass(slots=True)
class _Inode:
    """What is durable of a file or directory. ``fd`` reads what it holds now, whatever it is called, even when removed."""

    number: int
    fd: int
    is_dir: bool
    content: bytes | None = None
    """Durable bytes of a file; None when it was never flushed."""
    lost: bytes | None = None
    """What the page cache held when a flush failed."""
    entries: dict[str, int] = field(default_factory=dict)
    """Durable names of a directory."""
    seen: dict[tuple[int, str], int] = field(default_factory=dict)
    """(inode, name) of children that were flushed under this name since, by time."""

    def read(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)


@dataclass(slots=True)
class _Life:
    """Where an inode was in one directory since that was flushed, oldest first; None is nowhere."""

    inode: int
    places: list[tuple[float, str | None]]
    at: int = 0

    @property
    def name(self) -> str | None:
        return self.places[self.at][1]

    @property
    def time(self) -> float:
        return self.places[self.at][0]


@dataclass(slots=True)
class _Armed:
    kind: Fault
    code: int
    glob: str
    times: int | None


@dataclass(slots=True)
class _File:
    inode: int
    content: bytes
    unchanged: bool


_Tree = dict[str, "_File | _Tree"]


class Disk:
    """What is durable below ``root``; everything found there at the start is."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._spellings = tuple({self._root, os.path.abspath(root)})
        self._inodes: dict[int, _Inode] = {}
        self._inodes_max = SEEN_MAX
        self._excluded: list[str] = []
        self._faults: list[_Armed] = []
        self._full = False
        self._clock = 0
        self._top = self._pin(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY))
        self._adopt(self._top, "")

    def exclude(self, path: Path | str) -> None:
        """Leave ``path`` (absolute or below the root, wildcards allowed) and what is below it alone; its directories stay."""
        self._excluded.append(self._relative(str(path)) or str(path))

    def close(self) -> None:
        """Let every descriptor go."""
        while self._inodes:
            os.close(self._inodes.popitem()[1].fd)

    # What the product calls through its host.

    def writing(self, path: Path) -> None:
        """Let bytes be written, or refuse. Raises OSError with errno, text and file name."""
        if not (self._full or self._faults):
            return
        if self._full and self._relative(str(path)) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self._fail_if_armed("write", path)

    def fsync(self, fd: int, path: Path) -> None:
        """Remember what ``fd`` holds as durable. Raises OSError with errno, text and file name."""
        where = self._relative(str(path))
        if where is None or self._is_excluded(where):
            return
        number = os.fstat(fd).st_ino
        node = self._inodes.get(number) or self._pin(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
        if self._faults:
            try:
                self._fail_if_armed("fsync", path)
            except OSError:
                node.lost = None if node.is_dir else node.read()
                raise
        if node.is_dir:
            node.entries = self._listing(node, where)
            node.seen = {}
        else:
            node.content = _reached_storage(node)
        if where:
            self._observe(node, str(path))
        if len(self._inodes) > self._inodes_max:
            self._forget()

    # Faults.

    def fail_next(self, kind: Fault, code: int, path_glob: str = "*", *, times: int | None = 1) -> None:
        """Refuse the next ``times`` writes or flushes (None: all until ``clear``) of paths below the root that match."""
        self._faults.append(_Armed(kind, code, path_glob, times))

    def full(self, on: bool) -> None:
        """Refuse every write with ENOSPC, or no longer."""
        self._full = on

    def clear(self) -> None:
        """No faults any more."""
        self._faults, self._full = [], False

    def _fail_if_armed(self, kind: Fault, path: Path) -> None:
        where = self._relative(str(path))
        for fault in self._faults:
            if where is None or fault.kind != kind or not fnmatchcase(where, fault.glob):
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
            raise OSError(fault.code, os.strerror(fault.code), str(path))

    # Power loss.

    def power_loss(self, rng: random.Random) -> list[str]:
        """Rewrite the tree into one state that may be found after a power loss; it is durable then. Returns the choices.

        No process may have anything open below the root any more. One loss in eight finds only what was flushed, one in
        eight all that was written, the others a mixture.
        """
        style = rng.choice(["oldest", "newest", *["mixed"] * 6])
        log = [f"power loss: {style}"]
        tree = _Loss(self, style, rng, log).directory(self._top, "")
        self._write(self._root, "", tree)
        top, self._inodes = self._top.fd, {n: i for n, i in self._inodes.items() if i is not self._top}
        self.close()
        self._top = self._pin(top)
        self._adopt(self._top, "")
        return log

    def _write(self, path: str, where: str, tree: _Tree) -> None:
        """Make the real directory ``path`` hold ``tree``, touching only what differs."""
        present: dict[str, int] = {}
        for entry in list(os.scandir(path)):
            if self._is_excluded(_join(where, entry.name)) or not _is_plain(entry):
                continue
            is_dir = entry.is_dir(follow_symlinks=False)
            wanted = tree.get(entry.name)
            if wanted is None or isinstance(wanted, dict) != is_dir:
                shutil.rmtree(entry.path) if is_dir else os.unlink(entry.path)
            else:
                present[entry.name] = entry.inode()
        for name, item in tree.items():
            target = f"{path}/{name}"
            if isinstance(item, dict):
                if name not in present:
                    os.mkdir(target)
                self._write(target, _join(where, name), item)
            elif present.get(name) != item.inode or not item.unchanged:
                if name in present:
                    os.unlink(target)
                with open(target, "xb", buffering=0) as file:
                    file.write(item.content)

    # Bookkeeping.

    def _relative(self, path: str) -> str | None:
        """Path below the root, "" for the root itself, None outside."""
        for root in self._spellings:
            if path.startswith(root):
                if len(path) == len(root):
                    return ""
                if path[len(root)] == "/":
                    return path[len(root) + 1 :]
        return None

    def _is_excluded(self, where: str) -> bool:
        return any(fnmatchcase(where, glob) or fnmatchcase(where, f"{glob}/*") for glob in self._excluded)

    def _leads_to_excluded(self, where: str) -> bool:
        return any(glob.startswith(f"{where}/") for glob in self._excluded)

    def _pin(self, fd: int) -> _Inode:
        status = os.fstat(fd)
        node = _Inode(status.st_ino, fd, stat.S_ISDIR(status.st_mode))
        self._inodes[node.number] = node
        return node

    def _listing(self, node: _Inode, where: str) -> dict[str, int]:
        """Names a directory holds now, without the excluded ones; every inode among them is pinned."""
        found = {}
        with os.scandir(node.fd) as entries:
            for entry in entries:
                if _is_plain(entry) and not self._is_excluded(_join(where, entry.name)):
                    found[entry.name] = number = entry.inode()
                    if number not in self._inodes:
                        self._pin(os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=node.fd))
        return found

    def _adopt(self, node: _Inode, where: str) -> None:
        """Take everything below a directory for durable."""
        node.entries, node.seen = self._listing(node, where), {}
        for name, number in node.entries.items():
            child = self._inodes[number]
            if child.is_dir:
                self._adopt(child, _join(where, name))
            else:
                child.content, child.lost = child.read(), None

    def _observe(self, node: _Inode, path: str) -> None:
        """Remember the name under which an inode was flushed: it may be found under it as long as its directory is not."""
        head, _, name = path.rpartition("/")
        try:
            number = os.stat(head).st_ino
        except FileNotFoundError:
            return  # removed while open
        parent = self._inodes.get(number) or self._pin(os.open(head, os.O_RDONLY | os.O_DIRECTORY))
        if parent.entries.get(name) != node.number and (node.number, name) not in parent.seen:
            self._clock += 1
            parent.seen[node.number, name] = self._clock
            if len(parent.seen) > SEEN_MAX:
                del parent.seen[next(iter(parent.seen))]

    def _forget(self) -> None:
        """Drop inodes that no state after a power loss can show."""
        kept: set[int] = set()
        waiting = [(self._top, "")]
        while waiting:
            node, where = waiting.pop()
            kept.add(node.number)
            if not node.is_dir:
                continue
            names = [*node.entries.items(), *self._listing(node, where).items(), *((name, n) for n, name in node.seen)]
            waiting += [(self._inodes[n], _join(where, name)) for name, n in names if n not in kept]
        for number in [n for n in self._inodes if n not in kept]:
            os.close(self._inodes.pop(number).fd)
        self._inodes_max = max(SEEN_MAX, 2 * len(self._inodes))


class _Loss:
    """The choices of one power loss."""

    def __init__(self, disk: Disk, style: str, rng: random.Random, log: list[str]) -> None:
        self._disk, self._style, self._rng, self._log = disk, style, rng, log
        self._placed: set[int] = set()
        self._contents: dict[int, tuple[bytes, bool]] = {}

    def directory(self, node: _Inode, where: str) -> _Tree:
        """What is found in a directory."""
        self._placed.add(node.number)
        now = self._disk._listing(node, where)
        fixed = {name: number for name, number in now.items() if self._disk._leads_to_excluded(_join(where, name))}
        before = {name: number for name, number in node.entries.items() if not self._disk._is_excluded(_join(where, name))}
        lives = sorted(_lives(node, before, now, fixed), key=lambda life: [(name or "", time) for time, name in life.places])
        for life in lives:
            life.at = self._pick(len(life.places))
        _settle(lives, now)
        found: dict[str, int] = {}
        for life in lives:
            if len(life.places) > 1:
                course = " > ".join(name or "-" for _, name in life.places)
                self._log.append(f"{where or '.'}: {course}: {life.name or '-'}")
            if life.name is not None:
                found[life.name] = life.inode
        found |= fixed
        tree: _Tree = {}
        for name in sorted(found):
            child = self._disk._inodes[found[name]]
            if not child.is_dir:
                tree[name] = _File(child.number, *self._content(child, _join(where, name)))
            elif child.number not in self._placed:
                tree[name] = self.directory(child, _join(where, name))
        return tree

    def _pick(self, n: int) -> int:
        if self._style == "oldest" or n == 1:
            return 0
        return n - 1 if self._style == "newest" else self._rng.randrange(n)

    def _content(self, node: _Inode, where: str) -> tuple[bytes, bool]:
        """Content found, and whether it is what the file holds now."""
        if node.number not in self._contents:
            now = node.read()
            if now == node.content:
                self._contents[node.number] = now, True
            else:
                how, found = self._damage(node.content, now)
                self._log.append(f"{where}: {how}")
                self._contents[node.number] = found, found == now
        return self._contents[node.number]

    def _damage(self, durable: bytes | None, now: bytes) -> tuple[str, bytes]:
        old = durable or b""
        safe = len(old) if now.startswith(old) else 0
        kind = ("old", "torn", "hole", "now")[self._pick(4)]
        if kind == "old" or (kind != "now" and len(now) == safe):
            return "never flushed, empty" if durable is None else f"as flushed, {len(old)} bytes", old
        if kind == "now":
            return f"as written, {len(now)} bytes", now
        if kind == "torn":
            length = self._rng.randint(safe, len(now) - 1)
            return f"torn at {length} of {len(now)} bytes", now[:length]
        first = self._rng.randrange(safe // BLOCK, (len(now) - 1) // BLOCK + 1)
        last = self._rng.randint(first, (len(now) - 1) // BLOCK)
        start, end = max(safe, first * BLOCK), min(len(now), (last + 1) * BLOCK)
        return f"zeros from {start} to {end} of {len(now)} bytes", now[:start] + bytes(end - start) + now[end:]


def _lives(node: _Inode, before: dict[str, int], now: dict[str, int], fixed: dict[str, int]) -> Iterator[_Life]:
    """The life of every inode in one directory since that was flushed."""
    old_names, new_names = _by_inode(before), _by_inode(now)
    for number in {*old_names, *new_names, *(n for n, _ in node.seen)}.difference(fixed.values()):
        old, new = old_names.get(number, []), new_names.get(number, [])
        if len(old) > 1 or len(new) > 1:  # hard links: each name lives by itself
            for name in {*old, *new}:
                yield _life(number, [(0, name if name in old else None), (inf, name if name in new else None)])
            continue
        between = [(float(time), name) for (n, name), time in node.seen.items() if n == number]
        yield _life(number, [(0, old[0] if old else None), *between, (inf, new[0] if new else None)])


def _life(number: int, places: list[tuple[float, str | None]]) -> _Life:
    """A life without the moments at which nothing moved."""
    moved = [place for place, after in zip(places, [*places[1:], (inf, "/")], strict=True) if place[1] != after[1]]
    return _Life(number, moved)


def _by_inode(entries: dict[str, int]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, number in entries.items():
        names.setdefault(number, []).append(name)
    return names


def _settle(lives: list[_Life], now: dict[str, int]) -> None:
    """Make the chosen places agree: one inode per name, and no name empty between a file and the one that replaced it."""
    while True:
        holder: dict[str, _Life] = {}
        clash = False
        for life in lives:
            if life.name is None:
                continue
            other = holder.setdefault(life.name, life)
            if other is not life:
                clash = True
                earlier = min(other, life, key=lambda one: one.time)
                earlier.at += 1  # the later one took its name, so it had left
                break
        if not clash:
            break
    for life in sorted(lives, key=lambda one: -one.places[max(one.at - 1, 0)][0]):
        if life.name is None and life.at == len(life.places) - 1 and life.at > 0:
            left = life.places[life.at - 1][1]
            if left in now and left not in holder:
                life.at -= 1
                holder[left] = life


def _reached_storage(node: _Inode) -> bytes:
    """What a successful flush leaves on storage: everything, but for pages that an earlier failed one has lost."""
    now = node.read()
    if node.lost is None:
        return now
    old, lost = node.content or b"", node.lost
    pages = []
    for start in range(0, len(now), PAGE):
        page = now[start : start + PAGE]
        if page == lost[start : start + PAGE]:
            page = old[start : start + PAGE][: len(page)].ljust(len(page), b"\0")
        pages.append(page)
    return b"".join(pages)


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)


def _join(where: str, name: str) -> str:
    return f"{where}/{name}" if where else name
