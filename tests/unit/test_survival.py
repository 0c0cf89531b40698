"""Survival by bucket: the golden case, both sides of every limit, and what holds for any counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.core.survival import (
    UNKNOWN,
    Dimension,
    Limits,
    assess,
    kl_nats,
    kl_noise_nats,
    octave_names,
    reward_means,
    wilson,
)

GOLDEN = Path(__file__).resolve().parents[1] / "oracle" / "data" / "objectives.json"
COUNTS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)).map(lambda p: (max(p), min(p))), max_size=12)
"""(settled, trained) per bucket."""


def bucket(name: str, settled: int, trained: int, waiting: int = 0, reward_sum: float = 0.0) -> dict:
    dropped = {"failed": settled - trained} if settled > trained else {}
    return {
        "bucket": name, "opened": settled + waiting, "finished": trained, "trained": trained, "waiting": waiting,
        "dropped": dropped, "rewarded": trained, "rewarded_sum": reward_sum, "reward_sum": reward_sum,
    }  # fmt: skip


def assessed(*buckets: dict, name: str = "length", limits: Limits | None = None) -> Dimension:
    (dimension,) = assess({"dimensions": {name: list(buckets)}}, limits or Limits())
    return dimension


def test_the_golden_case_is_reproduced() -> None:
    case = next(c for c in json.loads(GOLDEN.read_text())["cases"] if c["id"] == "bias/survival")
    p, expected = case["params"], {name: entry["value"] for name, entry in case["expected"].items()}
    sums = [n * mean for n, mean in zip(p["trained"], p["reward_mean"], strict=True)]
    means = reward_means(p["bucket"], p["dispatched"], p["trained"], sums, p["cap"])
    rows = zip(p["bucket"], p["dispatched"], p["trained"], strict=True)
    made = assessed(*[bucket(*row) for row in rows])
    assert [b.survival for b in made.buckets] == pytest.approx(expected["survival"])
    assert means.naive == pytest.approx(expected["naive_mean"], abs=1e-12)
    assert means.ipw == pytest.approx(expected["ipw_mean"], abs=1e-12) == pytest.approx(expected["true_mean"])
    assert means.capped == pytest.approx(expected["ipw_capped_mean"], abs=1e-12)
    assert means.ess == pytest.approx(expected["ipw_capped_ess"], abs=1e-9)
    assert any(">16k" in alarm for alarm in made.alarms) and any("nats" in alarm for alarm in made.alarms)


def test_the_interval_is_wilsons() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0 and wilson(10, 10)[1] == 1.0
    for survived, settled in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="no share"):
            wilson(survived, settled)


@given(COUNTS)
def test_an_interval_lies_around_its_share_inside_0_and_1(rows: list[tuple[int, int]]) -> None:
    for settled, trained in rows:
        low, high = wilson(trained, settled)
        assert 0 <= low <= high <= 1
        assert settled == 0 or low <= trained / settled <= high


@given(COUNTS, st.floats(0.01, 10))
def test_a_distance_is_finite_not_negative_and_zero_for_equal_histograms(rows: list[tuple[int, int]], smoothing: float) -> None:
    settled, trained = [n for n, _ in rows], [k for _, k in rows]
    assert 0 <= kl_nats(settled, trained, smoothing) < math.inf
    assert kl_nats(settled, settled, smoothing) == 0


def test_the_distance_is_the_textbooks_without_smoothing_and_infinite_only_there() -> None:
    assert kl_nats([1, 1], [3, 1], 0) == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert kl_nats([1, 1], [1, 0], 0) == math.inf > kl_nats([1, 1], [1, 0])
    assert kl_nats([], []) == kl_nats([0, 0], [0, 0]) == kl_nats([3, 0], [0, 0]) == 0


@given(COUNTS.filter(lambda rows: any(k for _, k in rows)), st.floats(1, 10))
def test_a_constant_reward_is_every_mean_and_a_cap_never_raises_the_sample_size_above_the_count(
    rows: list[tuple[int, int]], cap: float
) -> None:
    names, settled, trained = [str(i) for i in range(len(rows))], [n for n, _ in rows], [k for _, k in rows]
    means = reward_means(names, settled, trained, [0.25 * k for k in trained], cap)
    for mean in (means.naive, means.ipw, means.capped):
        assert mean == pytest.approx(0.25)
    assert 0 < means.ess <= sum(trained) * (1 + 1e-9)


@given(COUNTS.filter(lambda rows: all(k for _, k in rows) and rows))
def test_weighing_gives_the_mean_of_everything_dispatched_when_each_bucket_has_a_survivor(rows: list[tuple[int, int]]) -> None:
    settled, trained = [n for n, _ in rows], [k for _, k in rows]
    rewards = [i / len(rows) for i in range(len(rows))]
    sums = [r * k for r, k in zip(rewards, trained, strict=True)]
    means = reward_means([str(i) for i in range(len(rows))], settled, trained, sums)
    true = sum(r * n for r, n in zip(rewards, settled, strict=True)) / sum(settled)
    assert means.ipw == pytest.approx(true) and means.unrepaired == ()


def test_weights_are_cut_above_the_cap_and_left_alone_at_it() -> None:
    at = reward_means(["a", "b"], [100, 100], [100, 50], [0.0, 50.0], 2.0)
    assert at.capped == at.ipw == pytest.approx(0.5)
    above = reward_means(["a", "b"], [100, 100], [100, 49], [0.0, 49.0], 2.0)
    assert above.ipw == pytest.approx(0.5) and above.capped == pytest.approx(98 / 198)
    with pytest.raises(ValueError, match="never below 1"):
        reward_means([], [], [], [], 0.9)


def test_a_bucket_without_a_survivor_is_reported_and_not_invented() -> None:
    means = reward_means(["short", "long", "empty"], [10, 7, 0], [10, 0, 0], [5.0, 0.0, 0.0])
    assert means.unrepaired == ("long",) and means.unrepaired_slots == 7
    assert means.naive == means.ipw == means.capped == 0.5


def test_nothing_trained_has_no_mean_and_nothing_at_all_no_alarm() -> None:
    means = reward_means(["a"], [5], [0], [0.0])
    assert (means.naive, means.ipw, means.capped, means.ess) == (None, None, None, 0.0)
    empty = assessed()
    assert empty.alarms == () and empty.buckets == () and empty.known_survival is None
    assert assess({"dimensions": {}}) == ()


def test_a_bucket_raises_an_alarm_below_the_margin_and_with_enough_slots() -> None:
    one_bucket_only = Limits(kl_max_nats=math.inf)
    high = wilson(20, 50)[1]
    others = bucket("1", 1000, 900)
    overall = 920 / 1050
    just_below = Limits(margin=overall - high - 1e-9, kl_max_nats=math.inf)
    just_above = Limits(margin=overall - high + 1e-9, kl_max_nats=math.inf)
    assert assessed(others, bucket("2-3", 50, 20), limits=just_below).alarm
    assert not assessed(others, bucket("2-3", 50, 20), limits=just_above).alarm
    assert not assessed(others, bucket("2-3", 49, 10), limits=one_bucket_only).alarm
    assert assessed(others, bucket("2-3", 50, 10), limits=one_bucket_only).alarm


def test_a_distance_raises_an_alarm_beyond_its_limit_and_what_chance_gives() -> None:
    rows = (bucket("1", 500, 400), bucket("2-3", 500, 250))
    distance = kl_nats([500, 500], [400, 250])
    noise = kl_noise_nats(2, 1000, 650)
    beyond = Limits(margin=1, kl_max_nats=distance - noise - 1e-9)
    within = Limits(margin=1, kl_max_nats=distance - noise + 1e-9)
    assert assessed(*rows, limits=beyond).alarm and not assessed(*rows, limits=within).alarm
    assert not assessed(*rows, name="difficulty", limits=beyond).alarm, "only some histograms are compared"


def test_chance_gives_no_distance_where_all_or_nothing_is_trained() -> None:
    assert kl_noise_nats(5, 10, 10) == kl_noise_nats(5, 10, 0) == kl_noise_nats(1, 10, 5) == 0
    assert kl_noise_nats(3, 100, 50) == pytest.approx((2 + 4) / 2 * 0.01)


def test_dropping_everything_alike_raises_no_alarm() -> None:
    assert not assessed(*[bucket(name, 200, 100) for name in octave_names(0, 6)]).alarm


def test_unknown_lengths_are_no_bucket_to_compare_but_too_many_are_an_alarm() -> None:
    at = assessed(bucket("1", 90, 90), bucket(UNKNOWN, 10, 0))
    assert not at.alarm and at.known_survival == 1 and at.means.unrepaired == (UNKNOWN,)
    (alarm,) = assessed(bucket("1", 89, 89), bucket(UNKNOWN, 11, 0)).alarms
    assert "11 of 100" in alarm
    assert not assessed(bucket("1", 89, 89), bucket(UNKNOWN, 11, 0), name="duration").alarm


def test_what_is_under_way_is_in_no_ratio() -> None:
    one = assessed(bucket("1", 10, 5, waiting=90))
    assert one.buckets[0].survival == 0.5 and one.buckets[0].settled == 10 and one.buckets[0].opened == 100
    assert assessed(bucket("1", 0, 0, waiting=3)).buckets[0].survival is None


def test_octaves_are_named_from_both_ends() -> None:
    assert octave_names(0, 3) == ("1", "2-3", "4-7", "8+")
    assert octave_names(-2, 1) == ("<0.5", "0.5-1", "1-2", "2+")
