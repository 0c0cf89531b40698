"""The whole staleness law: lag, capacity, and which version a fixed-lag slot is sampled under.

Owns the arithmetic of P5, rule R3 and the lag across a fork (R7). Never reads a clock or a database: counts come in as
arguments, from SQL.
Which check is the guarantee: the one inside the planning transaction (``head_lag``). ``may_open_groups`` only keeps
that check from firing.
"""

from __future__ import annotations


def base_version(step: int) -> int:
    """Version that step ``step`` (>= 1) trains from."""
    return step - 1


def head_lag(step: int, version_min: int) -> int:
    """Lag of the oldest token at the step that trains it, in versions."""
    return base_version(step) - version_min


def effective_version(version: int, fork_step: int | None) -> int:
    """Version of the trained lineage that lies as far back as ``version``, which was made in a lineage closed by a fork (R7).

    ``fork_step`` is that of the earliest fork beyond tolerance between the two lineages, None when there is none. Versions
    up to the fork are shared. One behind it lies as far before the fork as the path to it is long: the lag of
    ``effective_version`` at step s is (s - 1 - fork) + (version - fork).
    """
    if fork_step is None or version <= fork_step:
        return version
    return 2 * fork_step - version


def oldest_effective(version_min: int, version_max: int, fork_step: int | None) -> int:
    """Smallest effective version of a sample whose tokens have versions ``version_min`` to ``version_max``."""
    return min(effective_version(version_min, fork_step), effective_version(version_max, fork_step))


def may_open_groups(opened_unpublished: int, groups_per_step: int, max_lag_versions: int) -> int:
    """How many further groups may be opened now (R3).

    ``opened_unpublished``: opened groups that are neither terminal nor in a plan of a published step.
    """
    return max(0, (max_lag_versions + 1) * groups_per_step - opened_unpublished)


def fixed_step_of(ordinal: int, groups_per_step: int) -> int:
    """Step that trains the group ``ordinal`` in the fixed schedule (first step is 1)."""
    return ordinal // groups_per_step + 1


def fixed_ordinals(step: int, groups_per_step: int) -> range:
    """Ordinals of the groups of ``step`` in the fixed schedule."""
    return range((step - 1) * groups_per_step, step * groups_per_step)


def fixed_version(step: int, lag_versions: int) -> int:
    """Version under which the slots of ``step`` are sampled in the fixed schedule; the first steps use version 0."""
    return max(0, base_version(step) - lag_versions)
