"""What the screens say of a run that goes on badly: the lines, their limits, and that they go away by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.core.errors import DigestMismatch
from rollbook.learner.showing import timed_checkpoint
from rollbook.observe import failures
from rollbook.observe.failures import CHECKPOINT, DEATH, WEIGHTS, Failure
from rollbook.observe.ledger_metrics import noted_metrics
from rollbook.observe.metrics import failed_syncs
from rollbook.report.standing import standing
from rollbook.report.trouble import troubles

HEALTHY: dict[str, Any] = {
    "writer": {"commit_s": 0.01, "waiting": 0}, "breaker": {"ratio": 0.0, "window": 64},
    "last_step": {"step": 3, "ess_token_applied_fraction": 0.9},
}  # fmt: skip


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(failures, "_file", None)
    failures.keep_in(tmp_path, "learner")
    return tmp_path


def test_a_healthy_run_has_no_trouble_and_each_limit_is_one() -> None:
    assert troubles(HEALTHY, 100.0) == [] == troubles({}, 100.0)
    for key, quiet, loud, words in (
        ("writer", {"commit_s": 1.0}, {"commit_s": 1.1}, "database: slow, a commit takes up to 1.1 s"),
        ("breaker", {"ratio": 0.05, "last": "boom", "last_s": 1.0}, {"ratio": 0.06, "last": "boom", "last_s": 1.0}, "boom"),
        ("breaker", {"ratio": 0.9, "last": "boom", "last_s": 61.0}, {"ratio": 0.9, "last": "boom", "last_s": 60.0}, "90% of"),
        ("last_step", {"ess_token_applied_fraction": 0.3}, {"ess_token_applied_fraction": 0.04}, "is 4.0% of its tokens"),
    ):  # fmt: skip
        assert troubles(HEALTHY | {key: HEALTHY[key] | quiet}, 100.0) == []
        (line,) = troubles(HEALTHY | {key: HEALTHY[key] | loud}, 100.0)
        assert words in line


def test_a_failure_is_told_with_its_words_until_it_is_old() -> None:
    full = Failure("learner", CHECKPOINT, "storage", 3, 100.0, "OSError: No space left on device")
    (line,) = troubles({}, 160.0, [full])
    assert line == "learner: checkpoints fail (storage), 3 times, newest 60 s ago: OSError: No space left on device"
    assert troubles({}, 160.1, [full]) == []


def test_a_complete_run_is_not_in_trouble_whatever_it_met() -> None:
    died = Failure("worker-0", DEATH, "killed by SIGKILL", 1, 99.0, "loaded version")
    steps = {"configured": 3, "planned": 3, "trained": 3, "skipped": 0, "checkpoint": 3}
    going = {"steps": steps | {"checkpoint": 2}, "slots": {}, "roles": []}
    assert len(troubles(going, 100.0, [died])) == 1
    assert troubles(going | {"steps": steps}, 100.0, [died]) == []


def test_a_checkpoint_that_fails_is_counted_beyond_the_process_that_it_ends(noted: Path) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="full"), timed_checkpoint("write"):
            raise OSError("full")
    with pytest.raises(DigestMismatch), failed_syncs():
        raise DigestMismatch("other bytes")
    failures.keep_in(noted, "worker-0")  # another process, which finds what the first has left
    with pytest.raises(DigestMismatch), failed_syncs():
        raise DigestMismatch("other bytes")
    found = failures.read(noted)
    assert failures.counts(found, CHECKPOINT) == {"storage": 2} and failures.counts(found, WEIGHTS) == {"digest": 2}
    shown = {(s.name, s.labels["reason"]): s.value for family in noted_metrics(found) for s in family.samples}
    assert shown["rollbook_checkpoint_failures_total", "storage"] == 2
    assert shown["rollbook_weight_sync_failures_total", "digest"] == 2
    assert shown["rollbook_weight_sync_failures_total", "missing"] == 0
    assert {f.who for f in found} == {"learner", "worker-0"} and all(f.text for f in found)


def test_a_file_of_notes_that_is_damaged_or_cannot_be_written_costs_the_notes_alone(noted: Path) -> None:
    failures.note(CHECKPOINT, "other", "x")
    (file,) = (noted / "supervisor" / "failures").iterdir()
    file.write_text("{")
    assert failures.read(noted) == []
    file.write_text(json.dumps({"a": {"who": "learner"}, "b": 3}))
    assert failures.read(noted) == []
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no directory")
    failures.note(CHECKPOINT, "other", "x")
    assert failures.read(noted) == []


def test_the_last_word_of_the_dead_is_its_last_line_or_the_message_of_it() -> None:
    assert failures.last_word("a\nOSError: full\n\n") == "OSError: full"
    assert failures.last_word('a\n{"level": "error", "message": "no space"}\n') == "no space"
    assert failures.last_word("") == ""


def test_workers_without_weights_are_what_the_run_waits_for() -> None:
    worker = {"beat_age_s": 1.0, "version": None}
    state: dict[str, Any] = {
        "steps": {"configured": 10, "planned": 4, "trained": 4, "skipped": 0, "checkpoint": 4}, "head": {"version": 4},
        "roles": [{"role": "learner", "expires_in_s": 2.0}], "workers": [worker, worker], "limits": {"silent_s": 6.0},
        "slots": {"leased": 0, "pending": 8},
    }  # fmt: skip
    assert standing(state, 0.0).waits_for == "rollout workers to load version 4: none of 2 has any"
    state["workers"] = [worker, worker | {"version": 2}]
    assert standing(state, 0.0).waits_for.endswith("the newest weights that a worker has are those of version 2 of 4")
    state["workers"] = [worker, worker | {"version": 4}]
    assert standing(state, 0.0).waits_for == "a worker to lease one of 8 waiting slots"
    state["workers"] = [worker | {"beat_age_s": 6.1}]
    found = standing(state, 0.0)
    assert found.state == "stuck" and found.waits_for == "rollout workers: none was heard of in the last 6 s (1 silent)"
