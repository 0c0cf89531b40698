"""The ledger's SQLite files after a power loss, after ``kill -9``, and in between.

Owns what is durable of one database file and its WAL, and rewrites both into one legal state after a power loss. Never parses
a page: positions in the WAL and the progress of checkpoints are read from the WAL index (``-shm``), where SQLite keeps them.

Why every state made here is legal. Sources: sqlite.org/wal.html, sqlite.org/walformat.html, sqlite.org/atomiccommit.html,
sqlite.org/psow.html; all with ``synchronous=FULL``.

* COMMIT appends the transaction's frames and flushes the WAL before it returns. So the WAL up to the last acknowledged COMMIT
  is intact. Frames behind it (a transaction that goes on, was rolled back, or whose acknowledgement nobody has seen) were
  perhaps never flushed: sectors of 512 bytes reach storage in any order, whole, as zeros or as garbage, and the file's length
  is an entry of its own: it may be cut anywhere. Bytes of a sector that were not written stay as they are (powersafe
  overwrite, SQLite's default), so the acknowledged half of a sector shared with the tail is intact.
* A frame counts only with the salt of the WAL's header and a checksum over everything before it, and a transaction only with
  its last frame: a damaged tail is as good as none.
* A checkpoint flushes the WAL first, then writes pages into the database file, then flushes that. While it runs, any sector it
  writes may be old, new or garbage, and every such page is in the flushed part of the WAL. Before it runs, the database file
  is as the checkpoint before left it.
* The WAL starts again from its beginning only after a checkpoint of all of it was flushed; its new header has a new salt
  and is flushed before the first frame. So a WAL with another salt than at the last acknowledged COMMIT means that the
  database file alone holds everything acknowledged; a torn header, whose checksum fails, then loses nothing either.
* Closing the last connection checkpoints, flushes and then deletes the WAL: no WAL means the same.
* The WAL index is never flushed and is rebuilt by the first connection; it is removed here.

Not made: a WAL deleted by the last connection does not come back, and a database file that was never committed to is either
there as it is or not at all.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rollbook.ledger.dialects import Database

SECTOR = 512
WAL_HEADER = 32
FRAME_HEADER = 24
SUFFIXES = ("", "-wal", "-shm")


@dataclass(frozen=True, slots=True)
class _Index:
    """Head of the WAL index: generation of the WAL, end of its last commit, end of what a checkpoint has begun to copy."""

    salt: bytes
    end: int
    copying: int


@dataclass(frozen=True, slots=True)
class _Durable:
    """What the last acknowledged COMMIT left on storage."""

    salt: bytes
    end: int
    database: bytes
    state: tuple[bytes, int] | None
    """(salt, end of what was copied): the database file changes only together with it."""


class DatabaseDisk:
    """Durability of the database at ``path``. Make it before the first connection to it is opened.

    Everything found there is durable. Connections of SQLAlchemy engines to ``path`` are remembered, to be abandoned later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[int, tuple[Any, sa.Pool]] = {}
        self._durable: _Durable | None = None
        if path.exists():
            wal = self._read("-wal")
            self._durable = _Durable(wal[16:24], len(wal), path.read_bytes(), None)
        sa.event.listen(sa.pool.Pool, "connect", self._opened)
        sa.event.listen(sa.pool.Pool, "close", self._closed)

    def close(self) -> None:
        """Stop watching connections."""
        sa.event.remove(sa.pool.Pool, "connect", self._opened)
        sa.event.remove(sa.pool.Pool, "close", self._closed)

    def synced(self) -> None:
        """A COMMIT returned and its acknowledgement is about to be seen: all of it is durable now.

        Reads 132 bytes, and the database file only when a checkpoint has changed it.
        """
        index, durable = self._index(), self._durable
        state = None if index is None else (index.salt, index.copying)
        salt, end = (b"", 0) if index is None else (index.salt, index.end)
        if durable is None or state is None or state != durable.state:
            self._durable = _Durable(salt, end, self.path.read_bytes(), state)
        elif (salt, end) != (durable.salt, durable.end):
            self._durable = _Durable(salt, end, durable.database, state)

    # Death of the server's process.

    def copy_as_killed(self, target: Path) -> None:
        """Copy the files as ``kill -9`` leaves them, to ``target`` and its ``-wal`` and ``-shm``.

        To be taken before the dead process's connections are closed: closing would checkpoint and delete the WAL.
        """
        for suffix in SUFFIXES:
            copy = Path(f"{target}{suffix}")
            copy.unlink(missing_ok=True)
            if os.path.exists(f"{self.path}{suffix}"):
                shutil.copyfile(f"{self.path}{suffix}", copy)

    def put_back(self, source: Path) -> None:
        """Give files copied by ``copy_as_killed`` the database's names; they are new inodes, which no old lock concerns."""
        for suffix in SUFFIXES:
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            if os.path.exists(f"{source}{suffix}"):
                os.rename(f"{source}{suffix}", f"{self.path}{suffix}")

    def abandon(self, database: Database, *, shared: bool = False) -> None:
        """The server's process dies: its connections and its file lock go, the files stay as they are at this moment.

        With ``shared`` another living process has the database open and goes on: only this one's connections end, and the
        WAL stays because they are not the last. Without, SQLite deletes the WAL by name when the last connection closes, so
        the copies get their names only after that.
        """
        pools = (database.writer.pool, database.reader.pool)
        records = [record for record, pool in self._open.values() if not shared or pool in pools]
        killed = Path(f"{self.path}.killed")
        swap = bool(records) and not shared
        if swap:
            self.copy_as_killed(killed)
        for record in records:
            record.invalidate()
            self._open.pop(id(record), None)
        database.close()
        if swap:
            self.put_back(killed)

    def _opened(self, connection: Any, record: Any) -> None:
        pool = record._ConnectionRecord__pool
        if pool._dialect.name != "sqlite":
            return
        files = [row[2] for row in connection.execute("PRAGMA database_list")]
        if any(file and os.path.realpath(file) == os.path.realpath(self.path) for file in files):
            self._open[id(record)] = record, pool

    def _closed(self, _connection: Any, record: Any) -> None:
        self._open.pop(id(record), None)

    # Power loss.

    def power_loss(self, rng: random.Random) -> list[str]:
        """Leave one state of the files that may be found after a power loss; it is durable then. Returns the choices.

        Every connection must be abandoned before.
        """
        durable = self._durable
        if durable is None:
            return self._lose_new(rng)
        wal, now = self._read("-wal"), self.path.read_bytes()
        index = self._index()
        copying = index.copying if index is not None and index.salt == wal[16:24] else 0
        if durable.salt and durable.salt == wal[16:24]:
            database, wal, intact, log = self._same_wal(rng, durable, wal, now, index, copying)
        else:
            database = now
            wal, intact, log = self._new_wal(rng, wal, copying)
        _replace(self.path, database)
        _replace(Path(f"{self.path}-wal"), wal)
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        self._durable = _Durable(wal[16:24], intact, database, None)
        return [f"database: {line}" for line in log]

    def _lose_new(self, rng: random.Random) -> list[str]:
        """Nothing was ever acknowledged."""
        lost = rng.random() < 0.5
        for suffix in SUFFIXES if lost else ("-shm",):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        if not lost and self.path.exists():
            wal = self._read("-wal")
            self._durable = _Durable(wal[16:24], len(wal), self.path.read_bytes(), None)
        return [f"database: never committed to, {'gone' if lost else 'as it is'}"]

    def _same_wal(
        self, rng: random.Random, durable: _Durable, wal: bytes, now: bytes, index: _Index | None, copying: int
    ) -> tuple[bytes, bytes, int, list[str]]:
        """The WAL of the last acknowledged COMMIT, with more behind it, and a checkpoint before, at work or done."""
        moments = ["no checkpoint"]
        if now != durable.database:
            moments = ["before the checkpoint", "after the checkpoint"]
            if index is not None and index.salt == durable.salt:
                moments.append("in the checkpoint")
        moment = rng.choice(moments)
        log = [] if moment == "no checkpoint" else [moment]
        if moment == "before the checkpoint":
            database, end = durable.database, durable.end
        elif moment == "in the checkpoint":
            database, end = _torn(rng, durable.database, now), max(durable.end, copying)
        else:
            database, end = now, max(durable.end, copying)
            if moment == "after the checkpoint" and (index is None or index.salt != durable.salt):
                end = len(wal)  # the checkpoint is known by its traces only, and it flushed the WAL first
        wal, intact, how = _damage_tail(rng, wal, end)
        return database, wal, intact, [*log, how]

    def _new_wal(self, rng: random.Random, wal: bytes, copying: int) -> tuple[bytes, int, list[str]]:
        """The WAL started again, or was deleted, since the last acknowledged COMMIT: the database file holds all of it."""
        if len(wal) < WAL_HEADER:
            return b"", 0, ["no WAL"]
        if not copying and rng.random() < 0.25:
            return _garbled(rng, wal[:WAL_HEADER]), 0, ["new WAL, header torn"]
        wal, intact, how = _damage_tail(rng, wal, max(copying, WAL_HEADER))
        return wal, intact, ["new WAL", how]

    def _read(self, suffix: str) -> bytes:
        try:
            return Path(f"{self.path}{suffix}").read_bytes()
        except FileNotFoundError:
            return b""

    def _index(self) -> _Index | None:
        """Head of the WAL index; None when there is none, and so no WAL in use.

        Closing a file that SQLite has open drops this process's own locks on it, which only other processes would miss.
        """
        try:
            fd = os.open(f"{self.path}-shm", os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            head = os.pread(fd, 132, 0)
        finally:
            os.close(fd)
        if len(head) < 132:
            return None
        size, frames = struct.unpack_from("=HI", head, 14)
        (copied,) = struct.unpack_from("=I", head, 128)
        frame = FRAME_HEADER + (65536 if size == 1 else size)
        return _Index(head[32:40], WAL_HEADER + frames * frame if frames else 0, WAL_HEADER + copied * frame if copied else 0)


def _replace(path: Path, content: bytes) -> None:
    """Write a file as a new inode; none when it is empty."""
    path.unlink(missing_ok=True)
    if content:
        path.write_bytes(content)


def _garbled(rng: random.Random, data: bytes) -> bytes:
    """``data`` with every bit as likely wrong as right, and different."""
    noise = rng.randbytes(len(data))
    return noise if noise != data else bytes(len(data))


def _damage_tail(rng: random.Random, wal: bytes, end: int) -> tuple[bytes, int, str]:
    """The WAL with what stands behind ``end`` kept, dropped, cut or damaged; also how many of its bytes are as written."""
    tail = len(wal) - end
    if tail <= 0:
        return wal, len(wal), "WAL intact"
    how = rng.choice(["kept", "dropped", "cut", "torn", "flipped"])
    if how == "kept":
        return wal, len(wal), f"{tail} bytes behind the last commit kept"
    if how == "dropped":
        return wal[:end], end, f"{tail} bytes behind the last commit dropped"
    if how == "cut":
        left = rng.randrange(tail)
        return wal[: end + left], end + left, f"{left} of {tail} bytes behind the last commit kept"
    if how == "flipped":
        at, bit = rng.randrange(end, len(wal)), rng.randrange(8)
        return wal[:at] + bytes([wal[at] ^ (1 << bit)]) + wal[at + 1 :], at, f"bit {bit} of byte {at - end} of {tail} flipped"
    parts, intact, damaged = [wal[:end]], len(wal), 0
    at = end
    while at < len(wal):
        sector = wal[at : (at // SECTOR + 1) * SECTOR]
        found = rng.choice([sector, sector, bytes(len(sector)), _garbled(rng, sector)])
        if found != sector:
            intact, damaged = min(intact, at), damaged + 1
        parts.append(found)
        at += len(sector)
    return b"".join(parts), intact, f"{damaged} sectors of {tail} bytes behind the last commit damaged"


def _torn(rng: random.Random, old: bytes, new: bytes) -> bytes:
    """A file on its way from ``old`` to ``new``: every sector that differs is either or garbage, the length either."""
    length = max(len(old), len(new))
    before = old.ljust(length, b"\0")
    parts = []
    for at in range(0, length, SECTOR):
        a, b = before[at : at + SECTOR], new[at : at + SECTOR]
        parts.append(a if a == b else rng.choice([a, b, _garbled(rng, b)]))
    return b"".join(parts)[: rng.choice([len(old), len(new)])]
