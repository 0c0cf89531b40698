"""Public threads about staleness and policy versions, against the ledger and the learner.

Each test is named after its thread; its docstring says in our words what went wrong there.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_support import Scene, sample_for, trajectory, version
from threads_support import ACCEPTED, INVALID, drop_stale_group, of_groups, ordinals_of, outcome_of

from ledger_bench import Bench
from rollbook.core import staleness
from rollbook.core.config import config_from_table
from rollbook.core.errors import NotReady, ReplayDiverged
from rollbook.core.records import Trajectory


def trained(bench: Bench, steps: int, **rules: object) -> Scene:
    """A run that has published ``steps`` versions and has nothing open."""
    s = bench.scene(**rules)
    for step in range(1, steps + 1):
        s.feed(s.record.rules.groups_per_step)
        s.fill()
        s.train(step)
    return s


def test_areal_1388_the_staleness_bound_holds_after_a_restart(bench: Bench) -> None:
    """The counter of accepted rollouts began at 0 after a recovery, so far more were let in than the bound allows."""
    s = bench.scene(max_lag_versions=1)
    s.feed(20)
    assert ordinals_of(s.lease()) == [0, 1, 2, 3]
    for _ in range(2):
        bench.crash(s)
        assert s.lease() == ()
        assert bench.rows("SELECT count(DISTINCT ordinal) FROM lease") == [(4,)]


def test_miles_2835_the_policy_version_goes_on_where_it_was(bench: Bench) -> None:
    """After a resume the weight version began at 0 again."""
    s = trained(bench, 2)
    bench.crash(s)
    s.feed(2)
    reply = s.ledger.lease_slots(s.incarnation, version(0), 10)
    assert (reply.grants, reply.wanted) == ((), version(2))
    assert {g.version for g in s.lease()} == {2}
    assert outcome_of(lambda: s.ledger.publish_version(s.learner, version(0, content="again"))) is ReplayDiverged
    assert s.ledger.versions(0) == [version(0), version(1), version(2)]


def test_cosmos_rl_503_rollouts_of_the_version_before_the_restart_are_admitted(bench: Bench) -> None:
    """The version was reset at a restart, every rollout in flight was from its future, all were filtered, and the run hung."""
    s = trained(bench, 2)
    s.feed(2)
    grants = s.lease()
    bench.crash(s)
    assert s.submit(grants) == [ACCEPTED] * 4
    assert outcome_of(lambda: ordinals_of(s.plan(3))) == [4, 5]


def test_cosmos_rl_503_a_step_that_lacks_samples_says_how_many(bench: Bench) -> None:
    """The starved trainer waited and nothing told what it lacked."""
    s = bench.scene()
    s.feed(2)
    s.submit(of_groups(s.lease(), 0))
    bench.crash(s)
    with pytest.raises(NotReady) as missing:
        s.plan(1)
    assert "1 of 2 groups are complete" in str(missing.value)


def test_verl_7938_a_finished_rollout_counts_once_however_often_it_is_reported(bench: Bench) -> None:
    """Finished tasks were counted in two places, so the limit was reached with half of them and submission blocked."""
    s = bench.scene(max_lag_versions=1)
    s.feed(20)
    grants = s.lease()
    for _ in range(2):
        s.submit(of_groups(grants, 0, 1))
    s.train(1)
    assert ordinals_of(s.lease()) == [4, 5], "the two groups of the published step make room for two"
    assert s.lease() == ()


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_prime_rl_1901_a_group_exactly_at_the_bound_is_trained(bench: Bench, bound: int) -> None:
    """The bound was off by one: what it allowed was refused, or what it forbade was trained."""
    s = bench.scene(groups_per_step=1, max_lag_versions=bound, lease_ttl_s=10_000.0)
    s.feed(10)
    grants = s.lease()
    assert ordinals_of(grants) == list(range(bound + 1))
    s.submit(of_groups(grants, *range(1, bound + 1)))
    for step in range(1, bound + 1):
        s.train(step)
    assert s.submit(of_groups(grants, 0)) == [ACCEPTED, ACCEPTED]
    assert outcome_of(lambda: ordinals_of(s.plan(bound + 1))) == [0]


@pytest.mark.parametrize("bound", [1, 2])
def test_prime_rl_1901_a_group_one_beyond_the_bound_is_not_trained(bench: Bench, bound: int) -> None:
    """The other side of the same bound."""
    s = bench.scene(groups_per_step=1, max_lag_versions=bound, lease_ttl_s=10_000.0)
    s.feed(10)
    grants = s.lease()
    s.submit(of_groups(grants, 0)[:1] + of_groups(grants, *range(1, bound + 1)))
    for step in range(1, bound + 2):
        s.train(step)
        s.fill(2)
    late = s.submit(of_groups(grants, 0)[1:])
    assert late != [ACCEPTED]
    assert 0 not in ordinals_of(s.plan(bound + 2))
    assert bench.rows("SELECT DISTINCT ordinal, kind FROM verdict") == [(0, "dropped_stale")]


@given(per_step=st.integers(1, 64), bound=st.integers(0, 16), opened=st.integers(0, 2000))
def test_prime_rl_1902_capacity_is_the_most_that_no_step_can_find_too_old(per_step: int, bound: int, opened: int) -> None:
    """The number that may be opened and the lag that is allowed were derived apart and disagreed by one."""
    may = staleness.may_open_groups(opened, per_step, bound)
    assert may >= 0
    if may:
        last = opened + may

        def lag(n_groups: int) -> int:
            """Lag at which the newest of ``n_groups`` open groups, all of version 0, is trained, oldest first."""
            return staleness.head_lag(-(-n_groups // per_step), 0)

        assert lag(last) == bound
        assert lag(last + 1) == bound + 1


def configured(folder: Path, bound: int) -> object:
    return config_from_table({
        "run": {"id": "run", "dir": str(folder), "steps": 9},
        "model": {"path": "unused"},
        "task": {"source": "jsonl", "path": "unused.jsonl"},
        "schedule": {"max_lag_versions": bound},
        "workers": [{"engine": "transformers", "max_model_len": 48}],
        "learner": {"groups_per_step": 2, "group_size": 2},
    }).rules()  # fmt: skip


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_prime_rl_2812_the_configured_lag_is_the_one_that_holds(bench: Bench, tmp_path: Path, bound: int) -> None:
    """The target lag was a constant in the code, whatever the configuration said."""
    rules = configured(tmp_path, bound)
    s = bench.scene(max_lag_versions=rules.max_lag_versions, groups_per_step=2)  # type: ignore[attr-defined]
    s.feed(20)
    assert ordinals_of(s.lease()) == list(range(2 * (bound + 1)))


def test_prime_rl_2957_what_a_drop_throws_away_is_counted(bench: Bench) -> None:
    """Long rollouts were cancelled when their version grew old, and nobody saw how much was thrown away."""
    s = bench.scene(groups_per_step=1, lease_ttl_s=10_000.0)
    drop_stale_group(s, bench)
    assert bench.rows("SELECT sibling, n_tokens, generate_s FROM verdict ORDER BY 1") == [(0, 3, 0.5), (1, None, None)]


def test_prime_rl_2960_a_long_rollout_that_outlives_its_lease_is_kept(bench: Bench) -> None:
    """A rollout that took longer than its turn was thrown away although it was still fresh enough to train."""
    s = bench.scene(lease_ttl_s=30.0)
    s.feed(2)
    grants = s.lease()
    s.submit(of_groups(grants, 0))
    bench.let_time_pass(100.0)
    bench.crash(s)
    assert s.submit(of_groups(grants, 1)) == [ACCEPTED, ACCEPTED]
    assert ordinals_of(s.plan(1)) == [0, 1]
    assert s.ledger.run_status()["submits"]["salvaged"] == 2


def test_tinker_cookbook_822_the_length_of_what_is_dropped_is_kept_beside_what_is_trained(bench: Bench) -> None:
    """Discarding what is stale favours short tasks; without the lengths of the discarded ones the bias is invisible."""
    s = bench.scene(groups_per_step=1, lease_ttl_s=10_000.0)
    s.feed(6)
    grants = s.lease()
    long = [sample_for(g, s.incarnation, trajectory=trajectory(60)) for g in of_groups(grants, 0)]
    s.ledger.submit_samples(long[:1])
    s.submit(of_groups(grants, 1))
    for step in (1, 2):
        s.train(step)
        s.fill(2)
    s.plan(3)
    dropped = bench.rows("SELECT avg(n_tokens) FROM verdict WHERE kind = 'dropped_stale' AND n_tokens IS NOT NULL")[0][0]
    kept = bench.rows("SELECT avg(s.n_tokens) FROM sample s JOIN plan_item i ON i.ordinal = s.ordinal AND i.sibling = s.sibling")
    assert (float(dropped or 0), float(kept[0][0])) == (60.0, 3.0)


def mixed(*versions: int) -> Trajectory:
    """One token per version."""
    n = len(versions)
    ids, logprobs = struct.pack(f"<{n}i", *range(5, 5 + n)), struct.pack(f"<{n}f", *[-0.5] * n)
    return Trajectory(ids, logprobs, struct.pack(f"<{n}i", *versions))


def test_rllm_622_the_version_a_rollout_began_under_decides_its_lag(bench: Bench) -> None:
    """Rollouts were stamped with the version of their completion, so an old one that ended late passed as fresh."""
    s = bench.scene(groups_per_step=1, max_lag_versions=1, lease_ttl_s=10_000.0)
    s.feed(6)
    grants = s.lease()
    s.submit(of_groups(grants, 1))
    s.train(1)
    began_early = [sample_for(g, s.incarnation, trajectory=mixed(0, 0, 1)) for g in of_groups(grants, 0)]
    assert [r.outcome for r in s.ledger.submit_samples(began_early)] == [ACCEPTED, ACCEPTED]
    assert bench.rows("SELECT DISTINCT version_min, version_max FROM sample WHERE ordinal = 0") == [(0, 1)]
    s.fill(2)
    plan = s.plan(2)
    assert ordinals_of(plan) == [0]
    assert s.ledger.explain(plan.items[0].key)["lag"] == 1


def test_slime_1800_no_worker_is_fast_enough_to_run_ahead_of_the_bound(bench: Bench) -> None:
    """There was no limit: rollouts ran ahead of the trainer as far as the workers were fast."""
    s = bench.scene(max_lag_versions=1)
    s.feed(20)
    for _ in range(5):
        s.fill()
    assert bench.rows("SELECT max(ordinal) FROM sample") == [(3,)]
    s.train(1)
    for _ in range(5):
        s.fill()
    assert bench.rows("SELECT max(ordinal) FROM sample") == [(5,)]


def test_vllm_54443_every_token_has_the_version_that_sampled_it(bench: Bench) -> None:
    """A request that was running while weights changed had one version, and nobody could say which tokens it was true of."""
    s = bench.scene(groups_per_step=1, max_lag_versions=1, lease_ttl_s=10_000.0)
    s.feed(6)
    grants = s.lease()
    s.submit(of_groups(grants, 1))
    s.train(1)
    (g, other) = of_groups(grants, 0)
    sent = mixed(0, 0, 1, 1, 1)
    s.ledger.submit_samples([sample_for(g, s.incarnation, trajectory=sent)])
    stored = outcome_of(lambda: s.ledger.sample(g.key))
    assert getattr(stored, "trajectory", stored) == sent
    future = sample_for(other, s.incarnation, trajectory=mixed(0, 2))
    assert [r.outcome for r in s.ledger.submit_samples([future])] == [INVALID], "version 2 is not published"
