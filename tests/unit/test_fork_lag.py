"""The lag across a fork, and what a configuration may say about forks."""

from __future__ import annotations

import dataclasses

import pytest

from learner_support import make_config
from rollbook.core.changes import differences
from rollbook.core.errors import ConfigError
from rollbook.core.records import ForkVerdict, Lineage
from rollbook.core.staleness import base_version, effective_version, head_lag, oldest_effective
from rollbook.ledger.base import earliest_fork


def test_versions_up_to_the_fork_are_shared_and_lag_as_ever() -> None:
    for version in range(5):
        assert effective_version(version, None) == version
        assert effective_version(version, 4) == version
    assert effective_version(5, None) == 5


@pytest.mark.parametrize("step", [7, 9])
@pytest.mark.parametrize("version", [5, 6])
def test_a_version_behind_the_fork_lags_by_the_path_through_it(step: int, version: int) -> None:
    fork = 4
    assert head_lag(step, effective_version(version, fork)) == (base_version(step) - fork) + (version - fork)


def test_the_oldest_token_of_a_sample_may_be_its_newest_behind_a_fork() -> None:
    assert oldest_effective(3, 4, 4) == 3
    assert oldest_effective(3, 5, 4) == 3
    assert oldest_effective(3, 6, 4) == 2, "version 6 lies two behind the fork: as far as version 2"
    assert oldest_effective(1, 6, 4) == 1
    assert oldest_effective(3, 6, None) == 3


def test_the_earliest_fork_between_two_lineages_counts_only_those_with_the_verdict() -> None:
    lines = [
        Lineage(0, None, 0, ForkVerdict.WITHIN, None, 0.0),
        Lineage(1, 0, 6, ForkVerdict.DROPPED, None, 0.0),
        Lineage(2, 1, 4, ForkVerdict.WITHIN, 0.0, 0.0),
        Lineage(3, 2, 8, ForkVerdict.KEPT, 1.0, 0.0),
    ]
    beyond = (ForkVerdict.KEPT, ForkVerdict.DROPPED)
    assert [earliest_fork(lines, lineage, beyond) for lineage in range(4)] == [6, 8, 8, None]
    assert [earliest_fork(lines, lineage, (ForkVerdict.DROPPED,)) for lineage in range(4)] == [6, None, None, None]
    assert earliest_fork(lines, 0, (ForkVerdict.WITHIN,)) == 4


def test_what_a_divergence_does_may_change_at_any_time(tmp_path) -> None:
    config = make_config(tmp_path, tmp_path / "run")
    assert (config.learner.on_divergence, config.learner.keep_orphans) == ("stop", False)
    other = dataclasses.replace(
        config, learner=dataclasses.replace(config.learner, on_divergence="fork", fork_tolerance=0.0, keep_orphans=True)
    )
    assert other.digest() == config.digest()
    assert differences(config.to_json(), other.to_json()) == []


def test_a_divergence_stops_or_forks_and_the_tolerance_is_a_number_from_zero_up(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.on_divergence = 'ignore'"):
        make_config(tmp_path, tmp_path / "run", on_divergence="ignore")
    fixed = dataclasses.replace(make_config(tmp_path, tmp_path / "run").schedule, kind="fixed")
    with pytest.raises(ConfigError, match=r"learner\.keep_orphans"):
        dataclasses.replace(make_config(tmp_path, tmp_path / "run", keep_orphans=True), schedule=fixed)
    for tolerance in (-1e-9, float("nan")):
        with pytest.raises(ConfigError, match=r"learner\.fork_tolerance"):
            make_config(tmp_path, tmp_path / "run", fork_tolerance=tolerance)
