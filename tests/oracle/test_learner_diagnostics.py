"""Diagnostics against plain sums: any micro-batch split, junk under the mask, both sides of every threshold."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import pytest
import torch
from golden_objectives import core3

from rollbook.core.errors import InvalidRequest
from rollbook.learner.corrections import CorrectionSettings, correct
from rollbook.learner.diagnostics import (
    LAG_LIMIT,
    DiagnosticsAccumulator,
    DiagnosticsBatch,
    entropy_from_logits,
    step_diagnostics,
    trajectory_lags,
)

VERSION_TRAIN = 9


def _random_batch(seed: int, *, n: int = 11, width: int = 13, spread: float = 0.6) -> DiagnosticsBatch:
    rng = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn((n, width), generator=rng, dtype=torch.float64)

    logp_mu = -1.0 - normal().abs()
    logp_old = logp_mu + spread * normal()
    mask = torch.rand((n, width), generator=rng) < 0.7
    mask[4] = False
    mask[5, 0] = True
    logp_mu[5, 0] = float("nan")
    settings = CorrectionSettings(rejections=("k3",), k3_max=0.3)
    correction = correct(logp_old, logp_mu, mask, settings)
    return DiagnosticsBatch(
        logp_theta=logp_old + 0.3 * normal(),
        logp_old=logp_old,
        logp_mu=logp_mu,
        weights=correction.weights,
        advantages=torch.randn(n, generator=rng, dtype=torch.float64),
        mask=mask,
        keep=correction.keep,
        entropy=normal().abs(),
        versions=torch.randint(5, VERSION_TRAIN + 1, (n, width), generator=rng),
        version_train=VERSION_TRAIN,
    )


def _rows(batch: DiagnosticsBatch, rows: list[int]) -> DiagnosticsBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return DiagnosticsBatch(**{k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in values.items()})


def _same(actual: dict[str, float], wanted: dict[str, float]) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name


@pytest.mark.parametrize("seed", range(4))
def test_metrics_do_not_depend_on_the_micro_batch_split_or_on_ranks(seed: int) -> None:
    batch = _random_batch(seed)
    whole = step_diagnostics([batch])
    order = list(range(batch.mask.shape[0]))
    random.Random(seed).shuffle(order)
    _same(step_diagnostics([_rows(batch, [row]) for row in order]), whole)
    ranks = [DiagnosticsAccumulator(), DiagnosticsAccumulator()]
    for index, rows in enumerate((order[:2], order[2:5], order[5:])):
        ranks[index % 2].add(_rows(batch, rows))
    ranks[0].merge(ranks[1])
    _same(ranks[0].result(), whole)


def test_rank_tensors_combine_by_sum_and_maximum() -> None:
    batch = _random_batch(7)
    ranks = [DiagnosticsAccumulator() for _ in range(3)]
    for rank, rows in zip(ranks, ([0, 1, 2], [3, 4], [5, 6, 7, 8, 9, 10]), strict=True):
        rank.add(_rows(batch, rows))
    combined = DiagnosticsAccumulator()
    combined.sums = torch.stack([rank.sums for rank in ranks]).sum(0)
    combined.counts = torch.stack([rank.counts for rank in ranks]).sum(0)
    combined.maxima = torch.stack([rank.maxima for rank in ranks]).amax(0)
    _same(combined.result(), step_diagnostics([batch]))


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_junk_under_the_mask_never_reaches_a_metric(junk: float) -> None:
    batch = _random_batch(8)
    off = ~batch.mask
    names = ("logp_theta", "logp_old", "logp_mu", "weights", "entropy")
    dirty = replace(batch, **{name: getattr(batch, name).masked_fill(off, junk) for name in names})
    dirty = replace(dirty, versions=batch.versions.masked_fill(off, -1))
    assert step_diagnostics([dirty]) == step_diagnostics([batch])


def test_a_missing_behaviour_logprob_is_counted_and_left_out() -> None:
    batch = _random_batch(9)
    metrics = step_diagnostics([batch])
    hole = torch.zeros_like(batch.mask)
    hole[5, 0] = True
    assert metrics["behaviour_missing_tokens"] == 1
    without = step_diagnostics([replace(batch, mask=batch.mask & ~hole)])
    assert without.pop("behaviour_missing_tokens") == 0
    assert metrics.pop("behaviour_missing_tokens") == 1
    assert metrics == without


def test_metrics_match_their_definitions() -> None:
    batch = _random_batch(10)
    metrics = step_diagnostics([batch])
    on = batch.mask & torch.isfinite(batch.logp_mu)
    log_rho = torch.where(on, batch.logp_old - batch.logp_mu, 0.0)
    rho, w = log_rho.exp()[on], batch.weights[on]
    r = (batch.logp_theta - batch.logp_old).exp()
    positive = (batch.advantages > 0)[:, None] & on & batch.keep[:, None]
    negative = (batch.advantages < 0)[:, None] & on & batch.keep[:, None]
    n, used = int(on.sum()), on.any(1)
    sequence_rho = log_rho.sum(1).exp()[used]
    sequence_w = (batch.weights.sum(1) / on.sum(1).clamp(min=1))[used]
    wanted = {
        "tokens": n,
        "sequences": int(used.sum()),
        "rejected_fraction": float((w == 0).double().mean()),
        "weight_mean": float(w.mean()),
        "weight_max": float(w.max()),
        "ess_token_raw_fraction": float(1 / (rho / rho.mean()).square().mean()),
        "ess_token_applied_fraction": float(1 / (w / w.mean()).square().mean()),
        "ess_sequence_raw_fraction": float(1 / (sequence_rho / sequence_rho.mean()).square().mean()),
        "ess_sequence_applied_fraction": float(1 / (sequence_w / sequence_w.mean()).square().mean()),
        "chi2_token": float(rho.square().mean() - 1),
        "clip_high_fraction": int(((r > 1.28) & positive).sum()) / n,
        "clip_low_fraction": int(((r < 0.8) & negative).sum()) / n,
        "outside_band_fraction": int((((r > 1.28) | (r < 0.8)) & on).sum()) / n,
        "rho_above_cap_fraction": float((rho > 2).double().mean()),
        "entropy_mean": float(batch.entropy[on].mean()),
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=1e-12), name
    assert 0 < wanted["rejected_fraction"] < 1 and wanted["clip_low_fraction"] > 0 < wanted["clip_high_fraction"]


@pytest.mark.parametrize("spread", [1e-3, 0.01, 0.3, 3.0])
def test_quantiles_are_within_a_bin_of_the_exact_ones(spread: float) -> None:
    batch = replace(_random_batch(11, n=200, width=50, spread=spread), keep=None)
    metrics = step_diagnostics([batch])
    on = batch.mask & torch.isfinite(batch.logp_mu)
    log_rho = (batch.logp_old - batch.logp_mu)[on].sort().values
    rank = math.ceil(0.99 * log_rho.numel()) - 1
    exact, exact_abs = float(log_rho[rank]), float(log_rho.abs().sort().values[rank])
    assert math.log(metrics["rho_p99"]) == pytest.approx(exact, rel=2.5e-3, abs=2.5e-5)
    assert metrics["logp_gap_abs_p99"] == pytest.approx(exact_abs, rel=2.5e-3, abs=2.5e-5)


def test_on_policy_data_reports_no_drift_at_all() -> None:
    batch = _random_batch(12, spread=0.0)
    batch = replace(batch, logp_theta=batch.logp_old, weights=batch.mask.double(), keep=None)
    metrics = step_diagnostics([batch])
    ones = ["rho_mean", "rho_max", "rho_min", "rho_p99", "policy_ratio_mean", "policy_ratio_max"]
    ones += [name for name in metrics if name.startswith("ess_")]
    assert all(metrics[name] == pytest.approx(1.0, abs=1e-15) for name in ones)
    zeros = ["kl_behaviour_old_k1", "kl_behaviour_old_k3", "chi2_token", "chi2_sequence", "logp_gap_abs_p99"]
    zeros += ["clip_low_fraction", "clip_high_fraction", "outside_band_fraction", "rejected_fraction"]
    assert all(metrics[name] == pytest.approx(0.0, abs=1e-15) for name in zeros)


@pytest.mark.parametrize(("ratio", "advantage", "low", "high", "outside"), [
    (0.81, -1.0, 0, 0, 0),
    (0.79, -1.0, 1, 0, 1),
    (0.79, 1.0, 0, 0, 1),
    (1.27, 1.0, 0, 0, 0),
    (1.29, 1.0, 0, 1, 1),
    (1.29, -1.0, 0, 0, 1),
    (1.29, 0.0, 0, 0, 1),
])  # fmt: skip
def test_clip_fractions_know_the_sign(ratio: float, advantage: float, low: int, high: int, outside: int) -> None:
    zero, one = torch.zeros((1, 1)), torch.ones((1, 1))
    batch = DiagnosticsBatch(
        logp_theta=zero + math.log(ratio),
        logp_old=zero,
        logp_mu=zero,
        weights=one,
        advantages=one[0] * advantage,
        mask=one,
    )
    metrics = step_diagnostics([batch])
    names = ("clip_low_fraction", "clip_high_fraction", "outside_band_fraction")
    assert [metrics[name] for name in names] == [low, high, outside]
    rejected = step_diagnostics([replace(batch, keep=torch.tensor([False]))])
    assert [rejected[name] for name in names[:2]] == [0, 0]


@pytest.mark.parametrize(("rho", "above"), [(1.99, 0.0), (2.01, 1.0)])
def test_ratios_above_the_cap_are_counted_before_truncation(rho: float, above: float) -> None:
    zero, one = torch.zeros((1, 1)), torch.ones((1, 1))
    old = zero + math.log(rho)
    weights = correct(old, zero, one).weights
    batch = DiagnosticsBatch(logp_theta=old, logp_old=old, logp_mu=zero, weights=weights, advantages=one[0], mask=one)
    metrics = step_diagnostics([batch])
    assert metrics["rho_above_cap_fraction"] == above
    assert metrics["rho_max"] == pytest.approx(rho) and metrics["weight_max"] == pytest.approx(min(rho, 2.0))


def test_lags_are_counted_per_token_and_per_trajectory() -> None:
    data = core3(torch.float64)
    versions = torch.tensor([[7, 7, 8, 8, 8, -1], [9, 9, -1, 9, -1, -1], [6, 6, 6, 7, 7, 7]])
    batch = data.diagnostics_batch(data.correction(), versions=versions, version_train=10)
    metrics = step_diagnostics([batch])
    counts = {name: value for name, value in metrics.items() if name.endswith("_tokens") and name.startswith("lag_")}
    assert counts == {
        "lag_1_tokens": 3,
        "lag_2_tokens": 3,
        "lag_3_tokens": 5,
        "lag_4_tokens": 3,
        "lag_negative_tokens": 0,
    }
    assert sum(counts.values()) == metrics["tokens"]
    means = [metrics[f"lag_{name}_mean"] for name in ("head", "tail", "span")]
    assert means == pytest.approx([8 / 3, (2 + 1 + 3) / 3, 2 / 3])
    assert [metrics[f"lag_{name}_max"] for name in ("head", "tail", "span")] == [4, 3, 1]


def test_lags_outside_the_counted_range_are_still_counted() -> None:
    data = core3(torch.float64)
    base = data.diagnostics_batch(data.correction())
    for lag, name in (
        (0, "lag_0_tokens"),
        (LAG_LIMIT, f"lag_{LAG_LIMIT}_tokens"),
        (LAG_LIMIT + 1, f"lag_{LAG_LIMIT + 1}_tokens"),
        (LAG_LIMIT + 500, f"lag_{LAG_LIMIT + 1}_tokens"),
        (-1, "lag_negative_tokens"),
    ):
        versions = torch.full(data.mask.shape, 1000 - lag)
        metrics = step_diagnostics([replace(base, versions=versions, version_train=1000)])
        assert metrics[name] == metrics["tokens"] == 14
        assert metrics["lag_head_max"] == lag


def test_metrics_without_an_input_are_absent_rather_than_zero() -> None:
    data = core3(torch.float64)
    metrics = step_diagnostics([data.diagnostics_batch(data.correction())])
    assert "entropy_mean" not in metrics
    assert not [name for name in metrics if name.startswith("lag_")]


def test_ratios_beyond_the_number_range_stay_finite() -> None:
    data = core3(torch.float32)
    old = torch.full_like(data.logp_old, 1e4)
    batch = data.diagnostics_batch(data.correction(), logp_old=old)
    assert all(math.isfinite(value) for value in step_diagnostics([batch]).values())


@pytest.mark.parametrize("rows_max", [1, 4, 1024])
def test_entropy_is_that_of_the_distribution_the_engine_samples_from(rows_max: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn((2, 5, 17), generator=generator, dtype=torch.float64)
    logits[0, 0, 3:] = -torch.inf
    for temperature in (0.5, 1.0, 2.0):
        wanted = torch.distributions.Categorical(logits=(logits / temperature)[1]).entropy()
        got = entropy_from_logits(logits, temperature=temperature, rows_max=rows_max)
        torch.testing.assert_close(got[1], wanted)
        assert torch.isfinite(got).all() and got[0, 0] <= math.log(3)
    assert entropy_from_logits(logits.to(torch.bfloat16)).dtype == torch.float32


def test_mistakes_are_refused_with_a_reason() -> None:
    data = core3(torch.float64)
    batch = data.diagnostics_batch(data.correction())
    with pytest.raises(InvalidRequest, match="without a trainable token"):
        step_diagnostics([replace(batch, mask=torch.zeros_like(data.mask))])
    with pytest.raises(InvalidRequest, match="without a micro-batch"):
        step_diagnostics([])
    with pytest.raises(InvalidRequest, match="together"):
        replace(batch, version_train=3)
    with pytest.raises(InvalidRequest, match="one shape"):
        replace(batch, weights=batch.weights[:1])
    with pytest.raises(InvalidRequest, match="temperature"):
        entropy_from_logits(torch.zeros(3), temperature=0.0)
    with pytest.raises(InvalidRequest, match="no lag"):
        trajectory_lags(torch.ones((1, 2)), torch.zeros((1, 2)), 3)
    with pytest.raises(InvalidRequest, match="limits"):
        DiagnosticsAccumulator(cap=2.0).merge(DiagnosticsAccumulator(cap=3.0))
