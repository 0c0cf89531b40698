"""Every image of the ledger after a power loss holds what was acknowledged; the errors of its storage are the driver's."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from ledger_support import Scene, run_record, trajectory

from ledger_bench import ManualClock
from rollbook.core.errors import StorageFull, Unavailable
from rollbook.core.records import SubmitOutcome
from rollbook.ledger import dialects
from rollbook.ledger.ledger import Ledger
from rollbook.ledger.writer import Txn
from rollbook.observe import failpoints
from simulation.faults import DatabaseFaults
from simulation.images import SUFFIXES, DatabaseDisk

ACCEPTED, REPLAYED = SubmitOutcome.ACCEPTED, SubmitOutcome.REPLAYED
N_IMAGES = 200
IMAGES_PER_DEATH = 10
DEATHS_PER_DATABASE = 4
SHARED_MEMORY = Path("/dev/shm")
CHECKPOINT_PAGES = 60
"""A WAL of so many pages is checkpointed: small, so that most lives of a server see it happen."""


class Server:
    """A ledger server on a disk that loses power, and what its clients were told."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.disk = DatabaseDisk(path)
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.acknowledged: set[tuple[int, int]] = set()
        self.lives = 0
        self.start()

    def start(self) -> None:
        """A server on the files as they are. Its clients appear with the first submission."""
        self.clock.now += 1000
        self.lives += 1
        holder, dead = f"server-{self.lives}", f"server-{self.lives - 1}"
        self.ledger = Ledger(f"sqlite:///{self.path}", holder=holder, clock=self.clock, supersede=dead)
        pragma = f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}"
        sa.event.listen(self.ledger._database.writer, "connect", lambda connection, _: connection.execute(pragma))
        self.ledger._writer._drop_connection()
        self._scene: Scene | None = None

    @property
    def scene(self) -> Scene:
        if self._scene is None:
            rules = {"max_lag_versions": 1000, "lease_ttl_s": 10.0, "tokens_max": 10_000, "attempts_max": 1000}
            self._scene = Scene(self.ledger, run_record(**rules))
            self.disk.synced()
        return self._scene

    def submit(self) -> list[tuple[int, int]]:
        """One acknowledged submission of up to three samples."""
        keys = self.submit_unseen()
        self.disk.synced()
        self.acknowledged |= set(keys)
        return keys

    def submit_unseen(self) -> list[tuple[int, int]]:
        """A submission whose COMMIT nobody was told of."""
        self.scene.feed(2)
        grants = self.scene.lease(self.rng.randint(1, 3))
        size = self.rng.choice([3, 300, 3000])
        assert set(self.scene.submit(grants, trajectory=trajectory(size))) == {ACCEPTED}
        return [(g.key.ordinal, g.key.sibling) for g in grants]

    def checkpoint(self) -> None:
        """Pages go from the WAL into the database file; the next transaction begins the WAL anew."""
        with self.ledger._database.writer.connect() as conn:
            raw: Any = conn.connection.dbapi_connection
            busy, n_frames, n_copied = raw.execute("PRAGMA wal_checkpoint").fetchone()
        assert not busy and n_frames == n_copied

    def kill(self) -> None:
        """kill -9. Clients' threads and the writer's are not here: it has nothing queued."""
        self.ledger._bell.close()
        self.disk.abandon(self.ledger._database)
        self.ledger._writer._conn = None
        self.ledger._writer.close()

    def stored(self) -> set[tuple[int, int]]:
        with self.ledger._database.reading() as conn:
            return {(o, k) for o, k in conn.exec_driver_sql("SELECT ordinal, sibling FROM sample")}

    def wal(self) -> bytes:
        return Path(f"{self.path}-wal").read_bytes()

    def check(self) -> None:
        """SQLite's own check and the product's."""
        with self.ledger._database.reading() as conn:
            assert conn.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]
        self.ledger.attach("run")
        assert self.ledger.audit() == []

    def close(self) -> None:
        self.ledger.close()
        self.disk.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory where there is one: SQLite's own fsyncs decide nothing here."""
    made = tempfile.mkdtemp(prefix="rollbook-images-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    yield Path(made)
    shutil.rmtree(made)


@pytest.fixture
def server(directory: Path, sqlite_template: Path) -> Iterator[Server]:
    made = Server(Path(shutil.copy(sqlite_template, directory / "ledger.sqlite")), 0)
    yield made
    made.close()


def die(server: Server, seed: int) -> list[set[tuple[int, int]]]:
    """Some acknowledged work, some transactions that nobody was told of, and a kill; returns the latter's samples."""
    server.rng.seed(seed)
    for _ in range(server.rng.randint(0, 4)):
        server.submit()
    unseen = []
    for _ in range(server.rng.randint(0, 2)):
        unseen.append(set(server.submit_unseen()))
        if server.rng.random() < 0.4:
            server.checkpoint()
    if server.rng.random() < 0.2:
        server.ledger.close()
    server.kill()
    return unseen


def lose_power(server: Server, unseen: list[set[tuple[int, int]]], seed: int, seen: Counter[str]) -> None:
    """One image of a dead server's files, opened by a successor and looked at."""
    log = server.disk.power_loss(random.Random(seed))
    seen.update(re.sub(r"\d+", "N", line) for line in log)
    server.start()
    server.check()
    stored = server.stored()
    assert server.acknowledged <= stored, log
    kept = [len(stored & samples) for samples in unseen]
    assert all(n in (0, len(samples)) for n, samples in zip(kept, unseen, strict=True)), f"half of a transaction: {log}"
    assert sorted(kept, key=bool, reverse=True) == kept, f"a transaction without the one before it: {log}"
    seen.update("unseen kept" if n else "unseen lost" for n in kept)


def put_back(server: Server, killed: Path, durable: object) -> None:
    """The moment of the kill again."""
    for suffix in SUFFIXES:
        if os.path.exists(f"{killed}{suffix}"):
            shutil.copyfile(f"{killed}{suffix}", f"{killed}.next{suffix}")
    server.disk.put_back(Path(f"{killed}.next"))
    server.disk._durable = durable  # type: ignore[assignment]


@pytest.mark.timeout(400)
def test_every_acknowledged_sample_is_in_every_image_and_what_nobody_was_told_of_is_in_some(
    directory: Path, sqlite_template: Path
) -> None:
    seen: Counter[str] = Counter()
    killed = directory / "killed.sqlite"
    server = Server(Path(shutil.copy(sqlite_template, directory / "ledger.sqlite")), 0)
    for first in range(0, N_IMAGES, IMAGES_PER_DEATH):
        if first and first // IMAGES_PER_DEATH % DEATHS_PER_DATABASE == 0:
            server.close()
            server = Server(Path(shutil.copy(sqlite_template, directory / f"ledger-{first}.sqlite")), first)
        unseen, durable = die(server, first), server.disk._durable
        server.disk.copy_as_killed(killed)
        for seed in range(first, first + IMAGES_PER_DEATH):
            lose_power(server, unseen, seed, seen)
            if seed < first + IMAGES_PER_DEATH - 1:
                server.kill()
                put_back(server, killed, durable)
        server.acknowledged = server.stored()
    server.close()
    behind = "database: {}N bytes behind the last commit {}".format
    wanted = {
        "unseen lost", "unseen kept", behind("", "kept"), behind("", "dropped"), behind("N of ", "kept"),
        "database: N sectors of N bytes behind the last commit damaged", "database: bit N of byte N of N flipped",
        "database: WAL intact", "database: no WAL", "database: new WAL", "database: new WAL, header torn",
        "database: before the checkpoint", "database: in the checkpoint", "database: after the checkpoint",
    }  # fmt: skip
    assert wanted <= set(seen), wanted - set(seen)


def test_an_image_cut_before_the_last_acknowledged_commit_loses_it(server: Server) -> None:
    server.submit()
    end = server.disk._index().end  # type: ignore[union-attr]
    last = server.submit()
    server.kill()
    wal = Path(f"{server.path}-wal")
    wal.write_bytes(wal.read_bytes()[:end])
    server.start()
    server.check()
    assert server.acknowledged - server.stored() == set(last)


def again_and_again(server: Server, n: int) -> Iterator[random.Random]:
    """Kills the server and comes back to that moment ``n`` times, without a successor."""
    durable = server.disk._durable
    server.kill()
    killed = Path(f"{server.path}.copy")
    server.disk.copy_as_killed(killed)
    for seed in range(n):
        put_back(server, killed, durable)
        yield random.Random(seed)
    server.start()
    server.check()


def test_what_a_checkpoint_at_work_copies_stays_in_the_wal_and_its_pages_may_be_torn(server: Server) -> None:
    server.submit()
    old, end = server.path.read_bytes(), server.disk._index().end  # type: ignore[union-attr]
    server.submit_unseen()
    server.checkpoint()
    wal, new = server.wal(), server.path.read_bytes()
    databases: dict[str, set[bytes]] = {"before": set(), "in": set(), "after": set()}
    for rng in again_and_again(server, 60):
        moment = server.disk.power_loss(rng)[0].split()[1]
        assert server.wal().startswith(wal[:end] if moment == "before" else wal)
        databases[moment].add(server.path.read_bytes())
    assert (databases["before"], databases["after"]) == ({old}, {new})
    assert len(databases["in"]) > 5


def test_a_checkpoint_that_ended_before_the_last_acknowledged_commit_is_not_undone(server: Server) -> None:
    server.submit()
    server.checkpoint()
    server.submit()
    database = server.path.read_bytes()
    for rng in again_and_again(server, 20):
        server.disk.power_loss(rng)
        assert server.path.read_bytes() == database
    assert server.acknowledged == server.stored()


def test_a_tail_that_one_power_loss_has_left_whole_survives_the_next(server: Server) -> None:
    server.submit()
    server.submit_unseen()
    wal, kept = server.wal(), 0
    for rng in again_and_again(server, 60):
        server.disk.power_loss(rng)
        if server.wal() == wal:
            kept += 1
            server.disk.power_loss(rng)
            assert server.wal() == wal
    assert 0 < kept < 60


def test_what_a_successor_has_seen_survives_a_power_loss_that_comes_before_its_first_commit(server: Server) -> None:
    for seed in range(8):
        server.submit_unseen()
        server.kill()
        server.disk.power_loss(random.Random(seed))
        server.start()
        stored = server.stored()
        server.kill()
        server.disk.power_loss(random.Random(seed))
        server.start()
        assert stored == server.stored()


def test_a_killed_server_leaves_the_page_cache_as_it_was(server: Server) -> None:
    server.submit()
    unseen = server.submit_unseen()
    files = [Path(f"{server.path}{suffix}") for suffix in ("", "-wal")]
    before = [file.read_bytes() for file in files]
    server.kill()
    assert [file.read_bytes() for file in files] == before
    server.start()
    server.check()
    assert server.acknowledged | set(unseen) == server.stored()


def test_a_server_killed_inside_a_transaction_leaves_nothing_of_it(server: Server) -> None:
    server.submit()
    conn = server.ledger._database.writer.connect()
    conn.begin()
    conn.exec_driver_sql("DELETE FROM payload")
    server.kill()
    server.start()
    server.check()
    assert server.acknowledged == server.stored()


def test_one_of_two_servers_that_share_a_database_dies_alone(server: Server) -> None:
    server.submit()
    server.ledger._database._unlock()
    other = dialects.Database(f"sqlite:///{server.path}", server.clock, role_ttl_s=15.0)
    conn = other.writer.connect()
    conn.begin()
    inode = server.path.stat().st_ino
    with pytest.raises(sa.exc.OperationalError, match="locked"), server.ledger._database.writer.connect() as blocked:
        blocked.connection.dbapi_connection.execute("PRAGMA busy_timeout=0")  # type: ignore[union-attr]
        blocked.begin()
    server.disk.abandon(other, shared=True)
    server.submit()
    assert server.path.stat().st_ino == inode
    server.check()


def test_a_database_nobody_ever_committed_to_may_be_gone(directory: Path) -> None:
    found = set()
    for seed in range(20):
        path = directory / str(seed) / "ledger.sqlite"
        path.parent.mkdir()
        disk = DatabaseDisk(path)
        path.write_bytes(b"")
        disk.power_loss(random.Random(seed))
        found.add(path.exists())
        disk.close()
    assert found == {True, False}


@pytest.fixture
def faults(server: Server) -> Iterator[DatabaseFaults]:
    made = DatabaseFaults(server.ledger._database.writer)
    yield made
    made.close()
    failpoints.arm("")


@pytest.mark.parametrize("cause, error", [("io", Unavailable), ("full", StorageFull)])
def test_a_commit_that_fails_may_have_happened_or_not(server: Server, faults: DatabaseFaults, cause: str, error: type) -> None:
    server.scene.feed(4)
    before, after = server.scene.lease(2), server.scene.lease(2)
    faults.fail_next("commit_before", cause)  # type: ignore[arg-type]
    with pytest.raises(error):
        server.scene.submit(before)
    faults.fail_next("commit_after", cause)  # type: ignore[arg-type]
    with pytest.raises(error):
        server.scene.submit(after)
    assert server.stored() == {(g.key.ordinal, g.key.sibling) for g in after}
    assert server.scene.submit([*before, *after]) == [ACCEPTED, ACCEPTED, REPLAYED, REPLAYED]
    assert faults.raised == 2


@pytest.mark.parametrize("rolled_back", [True, False])
def test_a_statement_that_fails_leaves_nothing_of_its_transaction(
    server: Server, faults: DatabaseFaults, rolled_back: bool
) -> None:
    server.scene.feed(2)
    grants = server.scene.lease(2)
    for statement in ("BEGIN", "INSERT INTO sample", "INSERT INTO payload"):
        faults.fail_next("statement", containing=statement, rolled_back=rolled_back)
        with pytest.raises(Unavailable):
            server.scene.submit(grants)
        assert server.stored() == set()
    assert server.scene.submit(grants) == [ACCEPTED, ACCEPTED]


def test_faults_until_cleared_go_on_until_then(server: Server, faults: DatabaseFaults) -> None:
    faults.fail_next("statement", "full", times=None)
    for _ in range(3):
        with pytest.raises(StorageFull):
            server.scene.feed(1)
    faults.clear()
    server.scene.feed(1)

    def untouched(txn: Txn) -> int:
        return txn.conn.exec_driver_sql("SELECT count(*) FROM prompt_group").scalar_one()

    assert server.ledger._write(untouched) == 1
