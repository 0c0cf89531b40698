"""The checkpoint interval: Young's and Daly's arithmetic against its own definition, bounds, measuring, and what is shown."""

from __future__ import annotations

import logging
import math

import pytest

from rollbook.learner.interval import FIRST_STEPS, STEPS_MAX, Cadence, Interval, decide, interval_sentence, young_daly_s

MEASURED = {"save_s": 2.0, "checkpoint_bytes": 3 << 20, "step_s": 4.0, "replay_step_s": 1.0, "mtbf_s": 3600.0, "devices": 1}


def test_a_short_checkpoint_gives_youngs_square_root() -> None:
    assert young_daly_s(1e-6, 3600.0) == pytest.approx(math.sqrt(2 * 1e-6 * 3600.0), rel=1e-4)
    assert young_daly_s(0.0, 3600.0) == 0.0


def test_dalys_terms_are_added_up_to_twice_the_time_between_failures_and_no_further() -> None:
    m = 100.0
    for c in (1.0, 50.0, 199.9):
        r = math.sqrt(c / (2 * m))
        assert young_daly_s(c, m) == pytest.approx(math.sqrt(2 * c * m) * (1 + r / 3 + r * r / 9) - c)
    assert young_daly_s(200.0, m) == m == young_daly_s(1e9, m)


def lost_share(x: float, save_s: float, mtbf_s: float) -> float:
    """Daly's own model: time lost per second of work when failures are exponential and cost the work since the checkpoint."""
    return mtbf_s * math.expm1((x + save_s) / mtbf_s) / x - 1


@pytest.mark.parametrize("save_s", [0.1, 2.0, 30.0, 300.0])
def test_no_other_interval_loses_less_by_the_exponential_model(save_s: float) -> None:
    mtbf_s = 3600.0
    chosen = lost_share(young_daly_s(save_s, mtbf_s), save_s, mtbf_s)
    best = min(lost_share(young_daly_s(save_s, mtbf_s) * factor, save_s, mtbf_s) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0))
    assert chosen < best


def test_an_integer_stands_whatever_is_measured() -> None:
    assert decide(7, **MEASURED).steps == 7
    assert decide(7, **MEASURED | {"save_s": None}).rule == "configured"


@pytest.mark.parametrize("missing", ["save_s", "step_s", "replay_step_s"])
def test_while_something_is_not_measured_the_interval_is_small(missing: str) -> None:
    first = decide("auto", **MEASURED | {missing: None})
    assert (first.steps, first.rule) == (FIRST_STEPS, "first")


def test_waiting_for_rollouts_is_no_lost_training_so_a_waiting_learner_saves_later_by_the_clock() -> None:
    busy, waiting = decide("auto", **MEASURED | {"step_s": 1.0}), decide("auto", **MEASURED)
    assert busy.work_s == young_daly_s(2.0, 3600.0) and busy.steps == round(busy.work_s)
    assert waiting.work_s == young_daly_s(2.0, 3600.0 / 4) and waiting.steps == round(waiting.work_s)
    assert 1.9 < waiting.steps * 4.0 / (busy.steps * 1.0) < 2.1


def test_the_interval_has_at_least_one_step_and_at_most_the_bound() -> None:
    assert decide("auto", **MEASURED | {"replay_step_s": 4000.0, "step_s": 4000.0}).steps == 1
    assert decide("auto", **MEASURED | {"save_s": 0.0}).steps == 1
    assert decide("auto", **MEASURED | {"replay_step_s": 0.001, "step_s": 0.001}).steps == STEPS_MAX
    assert decide("auto", **MEASURED | {"replay_step_s": 0.0}).steps == FIRST_STEPS


def test_a_rarer_crash_and_a_dearer_checkpoint_make_the_interval_longer() -> None:
    usual = decide("auto", **MEASURED).steps
    assert decide("auto", **MEASURED | {"mtbf_s": 36_000.0}).steps > usual
    assert decide("auto", **MEASURED | {"save_s": 20.0}).steps > usual
    assert decide("auto", **MEASURED | {"step_s": 8.0, "replay_step_s": 2.0}).steps < usual


def test_what_a_crash_costs_is_the_replay_on_the_learners_devices() -> None:
    two = decide(10, **MEASURED | {"devices": 2})
    assert two.lost_device_s == 10 * 1.0 * 2
    assert decide(10, **MEASURED | {"replay_step_s": None}).lost_device_s is None


def test_the_sentence_shows_every_term() -> None:
    said = interval_sentence(decide("auto", **MEASURED).to_values() | {"reward_mean": 0.5})
    for term in ("every 59 steps (young/daly)", "save 2 s for 3 MiB", "step 4 s", "replayed in 1 s", "MTBF 3.6e+03 s",
                 "59 x 1 s x 1 device = 59 device-seconds of replay, 29.5 on average, and no generation"):  # fmt: skip
        assert term in said
    assert interval_sentence(decide(1, **MEASURED | {"replay_step_s": None}).to_values()) == "every 1 step (configured)"
    assert interval_sentence({"reward_mean": 0.5}) == ""


def test_a_cadence_begins_small_measures_and_logs_its_decision(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cadence = Cadence("auto", 3600.0)
    assert not cadence.due(FIRST_STEPS - 1, 0) and cadence.due(FIRST_STEPS, 0)
    cadence.saved(0, 100.0, 1 << 20)
    assert cadence.interval.rule == "first", "a checkpoint without moments says nothing about the others"
    for _ in range(2):
        cadence.stepped(4.0, 1.0)
    cadence.saved(1, 2.0, 3 << 20)
    assert cadence.interval.rule == "first", "two steps are too few"
    cadence.stepped(4.0, 1.0)
    cadence.saved(2, 2.0, 3 << 20)
    assert cadence.interval == decide("auto", **MEASURED)
    assert not cadence.due(60, 2) and cadence.due(61, 2)
    last = caplog.records[-1]
    assert last.event == "checkpoint_interval"  # type: ignore[attr-defined]
    assert {name: getattr(last, name) for name in cadence.interval.to_values()} == cadence.interval.to_values()
    cadence.saved(60, 12.0, 3 << 20)
    assert cadence.interval.save_s == pytest.approx(5.0), "a running mean"


def test_a_configured_cadence_saves_at_multiples_wherever_it_began() -> None:
    cadence = Cadence(4, 3600.0)
    assert [step for step in range(1, 13) if cadence.due(step, newest=3)] == [4, 8, 12]
    assert isinstance(cadence.interval, Interval) and cadence.interval.rule == "configured"
