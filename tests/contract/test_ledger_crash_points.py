"""The ledger server dying at each of its failpoints: its successor is asked again, and the run is the same run.

Here a death is an error that leaves the server as it stands, whose place another one takes, on both databases; and, on a
SQLite file, a process that is killed.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_support import STREAM, Scene, run_record, sample_for, version

from ledger_bench import Bench
from rollbook.cli.record import run_record as record_of
from rollbook.cli.serving import serve_ledger
from rollbook.core.config import load_config
from rollbook.core.errors import ServerFenced, StorageFull, Unavailable
from rollbook.core.records import Blame, FailureReport, LeaseGrant, RewardStatus, Role
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from run_support import CONFIG, wait_until

VERBS = (
    "ledger.before_commit", "ledger.after_commit", "ledger.before_answers",
    "ledger.role.before_commit", "ledger.role.after_commit",
    "ledger.append.before_cursor", "ledger.append.before_commit", "ledger.append.after_commit",
    "ledger.lease.before_commit", "ledger.lease.after_commit",
    "ledger.submit.before_payloads", "ledger.submit.before_commit", "ledger.submit.after_commit",
    "ledger.report.before_commit", "ledger.report.after_commit", "ledger.verdict.before_refill",
    "ledger.plan.before_items", "ledger.plan.before_commit", "ledger.plan.after_commit",
    "ledger.finish.before_commit", "ledger.finish.after_commit",
    "ledger.publish.before_commit", "ledger.publish.after_commit",
    "ledger.checkpoint.before_commit", "ledger.checkpoint.after_commit",
    "ledger.mark.before_commit", "ledger.mark.after_commit",
    "ledger.fork.before_commit", "ledger.fork.after_commit",
)  # fmt: skip
BETWEEN_STATEMENTS = (
    "ledger.append.before_cursor", "ledger.submit.before_payloads", "ledger.plan.before_items", "ledger.verdict.before_refill",
)  # fmt: skip
CROSSINGS = {"ledger.before_commit": 7, "ledger.after_commit": 7, "ledger.before_answers": 9, "ledger.publish.after_commit": 2}
"""Which crossing of a life is the last one of its server, where it is not the first."""
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.set_observer(None)
    failpoints.arm("")


class Life:
    """Every writing verb once, from the feeder's role to a fork; a call without an answer is made again to a new server."""

    def __init__(self, scene: Scene, on_death: Callable[[], None]) -> None:
        self.scene, self._on_death = scene, on_death
        self.deaths = 0
        scene.incarnation = scene.worker("w")

    def call(self, verb: Callable[[Ledger], Any]) -> Any:
        try:
            return verb(self.scene.ledger)
        except (Unavailable, FailpointRaised):
            self.deaths += 1
            self._on_death()
            return verb(self.scene.ledger)

    def lease(self, n: int, request_id: str) -> tuple[LeaseGrant, ...]:
        return self.call(lambda ledger: ledger.lease_slots("w", version(0), n, request_id=request_id)).grants

    def submit(self, grants: tuple[LeaseGrant, ...]) -> None:
        items = [sample_for(g, "w") for g in grants]
        assert {r.outcome.value for r in self.call(lambda ledger: ledger.submit_samples(items))} <= {"accepted", "replayed"}

    def live(self) -> None:
        s = self.scene
        s.feeder = self.call(lambda ledger: ledger.acquire_role(Role.FEEDER, "feeder-2", 60.0, "feeder-1"))
        self.call(lambda ledger: s.feed(4) if ledger.cursor(STREAM).next_ordinal == 0 else None)
        first, *others = self.lease(8, "r1")
        report = FailureReport(first.key, first.token, "w", RewardStatus.INFRA_ERROR, Blame.INFRA, "gone")
        self.call(lambda ledger: ledger.report_failures([report]))
        self.submit(tuple(g for g in others if g.key.ordinal != first.key.ordinal))
        self.submit(self.lease(2, "r2"))
        for step in (1, 2):
            self.call(lambda _, step=step: s.plan(step))
            self.call(lambda _, step=step: s.finish(step))
        for step in (0, 1, 2):
            self.call(lambda _, step=step: s.checkpoint(step))
        self.call(lambda ledger: ledger.mark_checkpoint(s.learner, 0, 0, "deleting"))
        self.call(lambda ledger: ledger.fork_lineage(s.learner, 0, 1, None, 0.0))

    def history(self, bench: Bench) -> dict[str, list[tuple]]:
        """What the life left, without times, epochs and events."""
        return {query: bench.rows(query) for query in HISTORY}


HISTORY = (
    "SELECT ordinal, n_siblings, refills FROM prompt_group ORDER BY ordinal",
    "SELECT stream, next_ordinal, state_json FROM cursor ORDER BY stream",
    "SELECT ordinal, sibling, lease_token, payload_digest FROM sample ORDER BY ordinal, sibling",
    "SELECT ordinal, sibling FROM payload ORDER BY ordinal, sibling",
    "SELECT ordinal, sibling, kind FROM verdict ORDER BY ordinal, sibling",
    "SELECT lineage, step, chain_digest FROM plan ORDER BY lineage, step",
    "SELECT lineage, step, pos, ordinal, sibling FROM plan_item ORDER BY lineage, step, pos",
    "SELECT lineage, step, outcome FROM plan_outcome ORDER BY lineage, step",
    "SELECT lineage, version, digest FROM policy_version ORDER BY lineage, version",
    "SELECT lineage, step, state FROM checkpoint ORDER BY lineage, step",
    "SELECT lineage, parent, fork_step FROM lineage ORDER BY lineage",
)  # fmt: skip
RULES: dict[str, object] = {"attempts_max": 1}


@pytest.fixture(scope="module")
def unbroken(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple]]:
    """The history of a life in which nothing dies."""
    path = tmp_path_factory.mktemp("unbroken") / "ledger.sqlite"
    path.write_bytes(sqlite_template.read_bytes())
    bench = Bench(f"sqlite:///{path}", _clock())
    life = Life(bench.scene(**RULES), lambda: None)
    life.live()
    found = life.history(bench)
    bench.finish()
    assert life.deaths == 0 and [(0, None, None), (1, 0, 1)] == found[HISTORY[-1]]
    return found


def _clock() -> Any:
    from ledger_bench import ManualClock

    return ManualClock()


@pytest.mark.parametrize("point", VERBS)
def test_a_server_that_dies_at_any_point_of_a_verb_is_followed_by_one_that_answers_it(
    bench: Bench, unbroken: dict[str, list[tuple]], point: str
) -> None:
    scene = bench.scene(**RULES)
    life = Life(scene, lambda: bench.crash(scene))
    failpoints.arm(f"{point}=raise@{CROSSINGS.get(point, 1)}")
    life.live()
    assert life.deaths == 1, f"{point} was not crossed"
    assert life.history(bench) == unbroken


def _killed_life(url: str, armed: str) -> None:
    failpoints.arm("")
    scene = Scene(Ledger(url, holder="child", ordinals_per_partition=4), run_record(**RULES))
    life = Life(scene, lambda: None)
    failpoints.arm(armed)
    life.live()


def _kill_at(url: str, point: str) -> None:
    process = FORK.Process(target=_killed_life, args=(url, f"{point}=crash@{CROSSINGS.get(point, 1)}"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("point", VERBS)
def test_a_server_that_is_killed_leaves_a_ledger_that_is_whole(sqlite_bench: Bench, point: str) -> None:
    _kill_at(sqlite_bench.url, point)
    ledger = sqlite_bench.open(supersede="child")
    ledger.open_run(run_record(**RULES))
    assert ledger.audit() == []


@pytest.mark.parametrize("point", BETWEEN_STATEMENTS)
def test_a_transaction_that_dies_between_two_statements_leaves_nothing(sqlite_bench: Bench, point: str) -> None:
    _kill_at(sqlite_bench.url, point)
    groups = len(sqlite_bench.rows("SELECT * FROM prompt_group"))
    cursors = sqlite_bench.rows("SELECT next_ordinal FROM cursor")
    assert cursors == ([(groups,)] if groups else [])
    assert len(sqlite_bench.rows("SELECT * FROM sample")) == len(sqlite_bench.rows("SELECT * FROM payload"))
    assert sqlite_bench.rows("SELECT * FROM plan WHERE step NOT IN (SELECT step FROM plan_item)") == []
    assert len(sqlite_bench.rows("SELECT DISTINCT ordinal FROM verdict")) == groups - 4 * bool(groups)


def test_some_callers_know_and_the_others_ask_again(bench: Bench) -> None:
    s = bench.scene()
    s.feed(2)
    grants = s.lease(3)
    entered, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        assert go.wait(60)

    answers: list[object] = [None] * 3

    def submit(i: int) -> None:
        try:
            answers[i] = s.submit([grants[i]])[0].value
        except Unavailable:
            answers[i] = "no answer"

    threads = [threading.Thread(target=lambda: s.ledger._write(hold))]
    threads += [threading.Thread(target=submit, args=(i,)) for i in range(3)]
    threads[0].start()
    assert entered.wait(60)
    for n, thread in enumerate(threads[1:], 1):
        thread.start()
        wait_until("the call waits", lambda n=n: s.ledger._writer.queue_depth() == n)
    failpoints.arm("ledger.mid_answers=raise@2")  # the first is the operation that holds the others up
    go.set()
    for thread in threads:
        thread.join(60)
    failpoints.arm("")
    assert sorted(map(str, answers)) == ["accepted", "no answer", "no answer"]
    assert sorted(s.submit([g])[0].value for g in grants) == ["replayed"] * 3


def test_a_server_that_lost_its_fence_dies_without_having_changed_anything(bench: Bench) -> None:
    s = bench.scene()
    crossed: list[str] = []
    failpoints.set_observer(crossed.append)
    failpoints.arm("ledger.fence_lost=raise")
    bench.execute("UPDATE fence SET epoch = epoch + 1, holder = 'successor' WHERE role = 'ledger'")
    with pytest.raises(Unavailable):
        s.feed(1)
    assert crossed.count("ledger.fence_lost") == 1 and s.ledger.fenced
    with pytest.raises(ServerFenced):
        s.feed(1)
    assert bench.rows("SELECT * FROM prompt_group") == []


@pytest.mark.parametrize(("number", "error"), [("ENOSPC", StorageFull), ("EIO", Unavailable)])
@pytest.mark.parametrize("point", ["ledger.before_commit", "ledger.append.before_cursor"])
def test_a_storage_that_refuses_acknowledges_nothing_and_the_same_call_succeeds_later(
    bench: Bench, point: str, number: str, error: type[Unavailable]
) -> None:
    s = bench.scene()
    failpoints.arm(f"{point}=error:{number}")
    with pytest.raises(error, match="repeat with the same key"):
        s.feed(1)
    assert bench.rows("SELECT * FROM prompt_group") == []
    assert s.feed(1).next_ordinal == 1


OPENING = ("ledger.open.after_create", "ledger.open.before_commit", "ledger.open.after_fence", "ledger.start.after_migration")


@pytest.mark.parametrize("point", OPENING)
@pytest.mark.parametrize("again", [False, True], ids=["a new run", "an old run"])
def test_a_server_that_dies_while_it_opens_a_run_is_followed_by_one_that_opens_it(bench: Bench, point: str, again: bool) -> None:
    record, epochs = run_record(), []
    if again:
        first = bench.open("first")
        epochs.append(first.open_run(record) and first._term.epoch)  # type: ignore[union-attr]
        first.close(release=False)
    failpoints.arm(f"{point}=raise")
    with pytest.raises((FailpointRaised, Unavailable)):
        bench.open("second", supersede="first").open_run(record)
    for ledger in bench.ledgers:
        ledger.close(release=False)
    third = bench.open("third", supersede="second" if point == "ledger.open.after_fence" else "first")
    assert third.open_run(record) == record and third.audit() == []
    epochs += [e for (e,) in bench.rows("SELECT epoch FROM fence WHERE role = 'ledger'")]
    assert epochs == sorted(set(epochs))
    assert len(bench.rows("SELECT * FROM run")) == len(bench.rows("SELECT * FROM config_revision")) == 1


@pytest.mark.parametrize("point", ["ledger.start.after_lock", "ledger.migrate.before_commit", "ledger.start.after_migration"])
def test_a_server_that_dies_before_it_has_a_schema_is_followed_by_one_that_makes_it(tmp_path: Path, point: str) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised):
        Ledger(url, holder="first")
    with Ledger(url, holder="second") as ledger:
        assert ledger.open_run(run_record()) == run_record() and ledger.audit() == []


def test_a_server_that_dies_behind_an_accepted_revision_is_followed_by_one_that_has_it(bench: Bench) -> None:
    s, changed = bench.scene(), run_record(max_lag_versions=3)
    failpoints.arm("ledger.open.after_revision=raise")
    with pytest.raises(FailpointRaised):
        s.ledger.open_run(changed, accept=["rules.max_lag_versions"])
    s.record = changed
    bench.crash(s)
    assert s.ledger.run.revision == 1 and s.ledger.rules.max_lag_versions == 3


def test_a_server_that_dies_behind_the_release_of_its_term_is_followed_at_once(bench: Bench) -> None:
    ledger = bench.scene().ledger
    failpoints.arm("ledger.close.after_release=raise")
    with pytest.raises(FailpointRaised):
        ledger.close()
    ledger.close(release=False)
    assert bench.open("stranger").open_run(run_record()) == run_record()


SERVING = (
    "ledger.files.before_rename", "ledger.files.after_rename", "ledger.files.before_revision", "ledger.start.before_address",
    "ledger.start.after_address",
)  # fmt: skip


@pytest.mark.parametrize("point", SERVING)
def test_a_server_that_dies_before_it_is_found_is_followed_by_one_that_is(tmp_path: Path, point: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    config = load_config(file)
    record, run_dir, stop = record_of(config), Path(config.run.dir), threading.Event()
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised):
        serve_ledger(config, record, stop)
    stale = (run_dir / "ledger.address").read_text() if (run_dir / "ledger.address").exists() else ""
    failpoints.arm("")
    server = threading.Thread(target=serve_ledger, args=(config, record, stop))
    server.start()
    try:
        address = run_dir / "ledger.address"
        wait_until("the server is found", lambda: address.exists() and address.read_text() != stale)
        stored = json.loads((run_dir / "config.json").read_text())["config"]
        assert json.loads((run_dir / "revisions" / "0.json").read_text()) == stored
    finally:
        stop.set()
        server.join(60)
    assert not server.is_alive() and not address.exists()
