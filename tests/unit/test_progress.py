"""What a role's loop says of itself, who is heard, and when silence counts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollbook.core.errors import ConfigError, Fenced
from rollbook.observe import progress
from rollbook.observe.health import Checked, Health, HealthPage
from rollbook.observe.progress import Bounds, Reporter, State, progress_file, read_record
from rollbook.rollout.heartbeat import Heartbeat
from rollbook.supervise.hangs import HangWatch
from rollbook.supervise.process import ProcessRecord
from rollbook.supervise.watchdog import Watched
from rollout_doubles import MemoryLedger
from run_support import wait_until
from task_fixtures import make_config

BOUNDS = Bounds(startup_s=300.0, busy_s=200.0, idle_s=100.0, stall_s=50.0)


def in_another_thread(call: object) -> None:
    thread = threading.Thread(target=call)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_record_says_what_the_loop_does_and_outlives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLBOOK_INCARNATION", "mine")
    file = progress_file(tmp_path, "worker-0")
    assert read_record(file) is None
    reporter = Reporter("worker-0", file)
    first = read_record(file)
    assert first is not None and (first.incarnation, first.state) == ("mine", "starting")
    reporter.mark(State.GENERATING)
    reporter.finished("ä" * 5000)
    reporter.mark(State.WAITING)
    reporter.close()
    last = read_record(file)
    assert last is not None and last.state == "waiting_for_ledger" and last.beats > first.beats
    assert last.finished.startswith("äää")
    assert file.stat().st_size == progress.RECORD_BYTES


def test_only_the_loops_own_thread_is_heard(tmp_path: Path) -> None:
    reporter = Reporter("learner", None)
    before = reporter.seen().beats
    in_another_thread(lambda: reporter.mark(State.TRAINING))
    assert (reporter.seen().beats, reporter.seen().state) == (before, "starting")
    reporter.mark()
    assert reporter.seen().beats == before + 1


def test_a_record_that_cannot_be_written_stops_nobody_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "supervisor").write_text("in the way")
    reporter = Reporter("feeder", progress_file(tmp_path, "feeder"))
    reporter.mark(State.WAITING)
    (tmp_path / "supervisor").unlink()
    reporter.mark(State.FEEDING)
    reporter.close()
    said = read_record(progress_file(tmp_path, "feeder"))
    assert said is not None and said.state == "feeding"


def test_a_process_without_a_reporter_says_nothing() -> None:
    progress.close_reporter()
    progress.mark(State.TRAINING)
    progress.finished("nothing")
    progress.ready(True)
    assert not progress.is_open()


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_a_bound_and_an_unknown_one_counts_as_work(state: State) -> None:
    expected = {State.STARTING: 300.0, State.WAITING: 100.0, State.JUDGING: 100.0, State.SERVING: 100.0}
    assert BOUNDS.silence_s(state) == expected.get(state, 200.0)
    assert BOUNDS.silence_s("something new") == 200.0


def test_a_pause_that_the_configuration_asks_for_is_no_silence() -> None:
    config = make_config(ledger={"role_ttl_s": 900.0})
    assert Bounds.of(config).idle_s == config.supervisor.idle_s + 300.0


def test_time_in_which_nothing_could_be_written_is_not_counted(tmp_path: Path) -> None:
    config = make_config(run={"dir": str(tmp_path)})
    role = ProcessRecord("worker-0", 2**22 + 1, 1, "mine")
    watch = HangWatch(config, lambda: [Watched(role, tmp_path / "no.log")], lambda text: None)
    (tmp_path / "supervisor").write_text("in the way")
    watch.look(10_000.0)
    assert watch.verdict("mine") == ""
    (tmp_path / "supervisor").unlink()
    watch.look(config.supervisor.startup_s)
    assert watch.verdict("mine") == ""
    watch.look(1.0)
    assert "while starting" in watch.verdict("mine")


def test_a_role_is_not_ready_before_it_says_so_nor_while_what_it_needs_fails() -> None:
    reporter = Reporter("ledger", None)
    health = Health(reporter, BOUNDS)
    assert health.answer("/readyz")[0] == 503
    wrong: list[str] = []
    reporter.set_ready(True, check=lambda: wrong[0] if wrong else "")
    assert health.answer("/readyz")[0] == 200
    reporter.set_ready(False, "it was told to stop")
    assert health.answer("/readyz")[1]["reason"] == "it was told to stop"
    assert health.answer("/")[0] == 404


def test_a_worker_whose_heartbeats_are_not_answered_is_of_no_use() -> None:
    ledger = MemoryLedger([])
    beat = Heartbeat(ledger, "worker", 5.0, 60.0)
    assert "no heartbeat was answered" in beat.wrong()
    beat.beat(0.0)
    assert beat.wrong() == ""
    ledger.fail("heartbeat", Fenced("gone"))
    beat.start()
    wait_until("the beats end", lambda: "heartbeats have ended" in beat.wrong(), 60.0)
    beat.stop()


def test_a_check_that_hangs_is_asked_once_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hangs() -> str:
        entered.set()
        leave.wait(60.0)
        return ""

    check = Checked(hangs)
    thread = threading.Thread(target=check)
    thread.start()
    assert entered.wait(60.0)
    assert "has not been answered" in check()
    leave.set()
    thread.join()
    assert check() == ""


def test_a_health_port_that_is_taken_says_which_setting_to_change() -> None:
    page = HealthPage(0, Health(Reporter("learner", None), BOUNDS))
    with pytest.raises(ConfigError, match="run.health_port"):
        HealthPage(page.port, Health(Reporter("learner", None), BOUNDS))
    page.close()
    HealthPage(page.port, Health(Reporter("learner", None), BOUNDS)).close()


@pytest.mark.parametrize(
    ("overlay", "named"),
    [
        ({"supervisor": {"idle_s": 14.9}}, "supervisor.idle_s"),
        ({"supervisor": {"busy_s": 0.0}}, "supervisor.busy_s"),
        ({"supervisor": {"startup_s": 0.0}}, "supervisor.startup_s"),
        ({"run": {"health_port": 65533}}, "run.health_port"),
    ],
)
def test_bounds_that_would_kill_what_works_are_refused(overlay: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_config(**overlay)
    make_config(supervisor={"idle_s": 15.0}, run={"health_port": 65532})
    make_config(supervisor={"idle_s": 1.0}, run={"chaos_allowed": True})
