"""Every golden vector of the learner's mathematics, in float64 and float32, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from golden_objectives import CASES, GOLDEN, TOLERANCE, Core3, core3, expected, largest_error, loss_and_gradient
from torch import Tensor

from rollbook.learner.advantages import group_advantages, groups_with_signal
from rollbook.learner.aggregation import aggregate, group_token_counts, step_denominators, token_weights
from rollbook.learner.corrections import (
    behaviour_ratio,
    keep_by_probability_change,
    keep_by_sign_and_drift,
    kl_k1,
    kl_k2,
    kl_k3,
    masked_log_ratio,
    normalise_weights,
    sequence_k3,
)
from rollbook.learner.diagnostics import entropy_from_logits, step_diagnostics, trajectory_lags
from rollbook.learner.objectives import clip_indicators

Handler = Callable[[torch.dtype], dict[str, Any]]

NO_CRITIC = "needs a value function; the learner has none"
ENGINE = "log-prob extraction and truncated sampling, tested with the model and the engine"
PEERS = "admission rule of another system, listed for comparison"
NOT_COVERED: dict[str, str] = {
    "core3/adv:grpo_population_std": "ddof=0 is listed as a trap, not offered",
    "groups12/adv:grpo_population_std": "ddof=0 is listed as a trap, not offered",
    "groups12/adv:reinforce_pp_baseline": "token-level whitening of advantages is not offered",
    "core3/gae_1.0_0.95": NO_CRITIC,
    "core3/gae_0.99_0.9": NO_CRITIC,
    "core3/value_loss": NO_CRITIC,
    "vtrace/clip1": NO_CRITIC,
    "vtrace/rho2_c1": NO_CRITIC,
    "vtrace/lam0.9_boot": NO_CRITIC,
    "vtrace/on_policy": NO_CRITIC,
    "core3/reinforce_pp": "KL in the reward is not offered",
    "core3/reinforce_pp_baseline": "token-level whitening of advantages is not offered",
    "core3/agg/micro_batches:token_mean_local_denominator": "the wrong value; see test_objectives_mutants.py",
    "shaping/overlong": "reward shaping belongs to the task, not to the learner",
    "kl/adaptive_controller": "the KL coefficient is a constant of the run",
    "vocab5/sampling:raw_logprobs": ENGINE,
    "vocab5/sampling:temperature_logprobs": ENGINE,
    "vocab5/sampling:kept": ENGINE,
    "vocab5/sampling:processed_logprobs_kept_only": ENGINE,
    "vocab5/sampling:wrong_scaled_logprobs": ENGINE,
    "vocab5/sampling:raw_vs_temp_bias": ENGINE,
    "vocab5/sampling:truncation_ratio": ENGINE,
    "vocab5/sampling:kept_mass": ENGINE,
    "vocab5/kl:chi2": "an expectation under p; the sample form is core3/diagnostics:chi2_token",
    "staleness/per_token:admit": "admission is the planning transaction's",
    "staleness/core3_mixed_versions:admit": "admission is the planning transaction's",
    "staleness/areal_capacity": PEERS,
    "staleness/areal_paper": PEERS,
    "staleness/prime_rl": PEERS,
    "staleness/verl": PEERS,
    "staleness/pipelinerl": PEERS,
    "bias/survival": "tests/unit/test_survival.py has it: survival weighting belongs to the report",
    "state/digest": "state digests belong to the checkpoint",
}
"""Golden values this module does not test: a case id, or a case id and one of its names, and why."""


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def _clip_fraction(data: Core3, limits: dict[str, float], correction: Any, **changes: Any) -> float:
    clips = {name: limits[name] for name in ("clip_low", "clip_high")}
    metrics = step_diagnostics([data.diagnostics_batch(correction, **changes)], **clips)
    return metrics["clip_low_fraction"] + metrics["clip_high_fraction"]


def _loss_case(
    name: str, *, weight: str | None = None, correction: dict[str, Any] | None = None, **fixed: Any
) -> Handler:
    """Build the handler of a case that trains core3 with one objective."""

    def handler(dtype: torch.dtype) -> dict[str, Any]:
        data = core3(dtype)
        settings = dict(fixed)
        changes: dict[str, Any] = {"advantages": data.advantages(settings.pop("advantage", "grpo"))}
        denominators = data.denominators()
        corrected = data.correction(weight or "none", **(correction or {}))
        if weight is not None:
            changes |= {"weights": corrected.weights, "keep": corrected.keep}
        if settings.pop("kept_denominator", False):
            denominators = step_denominators((data.mask & corrected.keep[:, None]).sum(1))
        if settings.pop("bypass", False):
            changes["logp_old"] = data.logp_mu
        if settings.get("kl_beta"):
            changes["logp_ref"] = data.logp_ref
        if settings.get("aggregation") == "prompt-mean-token-mean":
            changes["group_tokens"] = group_token_counts(data.mask.sum(1), data.group)
        result, gradient = loss_and_gradient(name, data.batch(**changes), denominators, **settings)
        values = {"loss": result.loss, "token_loss": result.token_loss, "grad_logp_theta": gradient}
        if result.coefficient is not None:
            values["coef"] = result.coefficient
        if "clip_high" in settings:
            old = {"logp_old": changes.get("logp_old", data.logp_old), "advantages": changes["advantages"]}
            values["clipfrac"] = _clip_fraction(data, settings, corrected, **old)
            limits = {key: settings[key] for key in ("clip_low", "clip_high")}
            low, high, _ = clip_indicators(result.ratio[:, 0], changes["advantages"], **limits)
            values["seq_clipped"] = low | high
        return values

    return handler


def _adv(dtype: torch.dtype) -> dict[str, Any]:
    data = core3(dtype)
    names = {"grpo": "grpo", "dr_grpo": "group_mean_centred", "rloo": "rloo"}
    return {name: data.advantages(estimator) for name, estimator in names.items()}


def _ratios(dtype: torch.dtype) -> dict[str, Any]:
    data = core3(dtype)
    ratio = behaviour_ratio(data.logp_old, data.logp_mu, data.mask)
    used = {
        name: loss_and_gradient(name, data.batch(), data.denominators())[0].ratio
        for name in ("ppo_clip", "reinforce_is", "gspo")
    }
    return {
        "policy_ratio": _masked(used["ppo_clip"], data.mask),
        "behaviour_ratio": _masked(ratio.rho, data.mask),
        "total_ratio": _masked(used["reinforce_is"], data.mask),
        "gspo_ratio": used["gspo"][:, 0],
        "behaviour_ratio_seq_prod": ratio.sequence_product[:, 0],
        "behaviour_ratio_seq_geo": ratio.sequence_mean(ratio.log_rho).exp(),
    }


def _weights(dtype: torch.dtype) -> dict[str, Any]:
    data = core3(dtype)
    tis = data.correction("token_tis").weights
    ratio = behaviour_ratio(data.logp_old, data.logp_mu, data.mask)
    opsm_keep, opsm_stat = keep_by_sign_and_drift(
        data.logp_theta, data.logp_mu, data.advantages(), data.mask, drift_max=1e-4
    )
    advantages = data.advantages()[:, None].expand_as(data.mask)
    change = {"change_low": 0.2, "change_high": 0.2}
    geometric = {"geometric_low": 0.98, "geometric_high": 1.02}
    return {
        "token_tis": tis,
        "seq_tis": data.correction("sequence_tis").weights,
        "icepop": data.correction("token_mis").weights,
        "token_mis": data.correction("token_mis", band_high=2.0).weights,
        "seq_mis": data.correction("sequence_mis").weights,
        "token_tis_batch_normalised": normalise_weights(tis, weight_sum=tis.sum(), token_count=data.mask.sum()),
        "geo_rs_keep": data.correction(rejections=("geometric",), **geometric).keep,
        "k3_rs_keep": data.correction(rejections=("k3",), k3_max=0.25).keep,
        "k3_rs_stat": sequence_k3(ratio),
        "veto_keep": data.correction(rejections=("veto",), veto_below=0.45).keep,
        "opsm_keep": opsm_keep,
        "opsm_stat": opsm_stat,
        "dppo_keep": keep_by_probability_change(data.logp_theta, data.logp_mu, advantages, data.mask, **change),
    }


def _dppo(dtype: torch.dtype) -> dict[str, Any]:
    return _loss_case("dppo_kl")(dtype) | {"keep": _weights(dtype)["dppo_keep"]}


def _opsm(dtype: torch.dtype) -> dict[str, Any]:
    params = CASES["opsm/sign_rule"]["params"]
    theta, mu, advantages = (torch.tensor(params[k], dtype=dtype) for k in ("logp_theta", "logp_mu", "advantages"))
    mask = torch.ones_like(theta, dtype=torch.bool)
    keep, stat = keep_by_sign_and_drift(theta, mu, advantages, mask, drift_max=params["delta"])
    return {"keep": keep, "stat": stat}


def _agg(mode: str) -> Handler:
    def handler(dtype: torch.dtype) -> dict[str, Any]:
        data = core3(dtype)
        token_loss = expected("core3/dapo", "token_loss").to(dtype).requires_grad_(True)
        extra = {"length_max": data.l_max, "group_tokens": group_token_counts(data.mask.sum(1), data.group)}
        loss = aggregate(token_loss, data.mask, data.denominators(), mode, **extra)
        loss.backward()
        assert torch.equal(token_loss.grad, token_weights(data.mask, data.denominators(), mode, **extra).to(dtype))
        return {"loss": loss, "token_weight": token_loss.grad}

    return handler


def _micro_batches(dtype: torch.dtype) -> dict[str, Any]:
    data = core3(dtype)
    token_loss = expected("core3/dapo", "token_loss").to(dtype)
    shares = [
        aggregate(token_loss[rows], data.mask[rows], data.denominators(), "token-mean")
        for rows in CASES["core3/agg/micro_batches"]["params"]["micro_batches"]
    ]
    return {"token_mean_global_denominator": torch.stack(shares).sum()}


def _data_parallel(dtype: torch.dtype) -> dict[str, Any]:
    data = core3(dtype)
    token_loss = expected("core3/dapo", "token_loss").to(dtype)
    params = CASES["core3/agg/data_parallel"]["params"]
    denominators = step_denominators(data.mask.sum(1), gradient_ranks=params["dp_size"])
    ranks = [aggregate(token_loss[r], data.mask[r], denominators, "token-mean") for r in params["ranks"]]
    return {"rank_loss": torch.stack(ranks), "mean_over_ranks": torch.stack(ranks).mean()}


def _diagnostics(dtype: torch.dtype) -> dict[str, Any]:
    data = core3(dtype)
    metrics = step_diagnostics([data.diagnostics_batch(data.correction())])
    icepop = step_diagnostics([data.diagnostics_batch(data.correction("token_mis"))])
    n, sequences = metrics["tokens"], metrics["sequences"]
    log_ref = masked_log_ratio(data.logp_ref, data.logp_theta, data.mask)
    ratio = behaviour_ratio(data.logp_old, data.logp_mu, data.mask)
    same_name = {
        "rho_mean": "rho_mean",
        "rho_max": "rho_max",
        "rho_min": "rho_min",
        "policy_ratio_mean": "policy_ratio_mean",
        "policy_ratio_max": "policy_ratio_max",
        "outside_band_0.2_0.28": "outside_band_fraction",
        "tis_frac_high": "rho_above_cap_fraction",
        "abs_logp_diff_mean": "logp_gap_abs_mean",
        "abs_logp_diff_max": "logp_gap_abs_max",
        "kl_mu_old_k1": "kl_behaviour_old_k1",
        "kl_mu_old_k2": "kl_behaviour_old_k2",
        "kl_mu_old_k3": "kl_behaviour_old_k3",
        "kl_old_theta_k1": "kl_old_policy_k1",
        "kl_old_theta_k3": "kl_old_policy_k3",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
        "ppl_mu": "ppl_behaviour",
        "ppl_old": "ppl_old",
        "m2_theta_mu": "logp_drift_sq_mean",
        "ess_token_raw_frac": "ess_token_raw_fraction",
        "ess_token_tis_frac": "ess_token_applied_fraction",
        "ess_seq_raw_frac": "ess_sequence_raw_fraction",
        "ess_total_ratio_frac": "ess_token_total_fraction",
        "n_tokens": "tokens",
    }
    values: dict[str, Any] = {golden: metrics[ours] for golden, ours in same_name.items()}
    assert abs(metrics["log_ppl_gap_mean"] - float(expected("core3/diagnostics", "log_ppl_diff").mean())) < 2e-5
    return values | {
        "ess_token_raw": metrics["ess_token_raw_fraction"] * n,
        "ess_token_tis": metrics["ess_token_applied_fraction"] * n,
        "ess_token_icepop_frac": icepop["ess_token_applied_fraction"],
        "ess_seq_raw": metrics["ess_sequence_raw_fraction"] * sequences,
        "clipfrac_0.2_0.28": metrics["clip_low_fraction"] + metrics["clip_high_fraction"],
        "kl_theta_ref_k1": kl_k1(log_ref).sum() / n,
        "kl_theta_ref_k2": kl_k2(log_ref).sum() / n,
        "kl_theta_ref_k3": kl_k3(log_ref).sum() / n,
        "log_ppl_diff": -ratio.sequence_mean(ratio.log_rho),
    }


def _groups12(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    fixture = GOLDEN["fixtures"]["groups12"]
    rewards = torch.tensor(fixture["rewards"], dtype=dtype)
    return rewards, torch.tensor(fixture["group"]), torch.tensor(fixture["lengths"])


def _groups_adv(dtype: torch.dtype) -> dict[str, Any]:
    rewards, group, _ = _groups12(dtype)
    names = {
        "grpo": "grpo",
        "dr_grpo": "group_mean_centred",
        "rloo": "rloo",
        "batch_std": "batch_std",
        "center_then_batch_std": "centre_then_batch_std",
        "max_rl": "max_rl",
    }
    values: dict[str, Any] = {name: group_advantages(rewards, None, group, estimator=e) for name, e in names.items()}
    values["grpo_eps_1e-4"] = group_advantages(rewards, None, group, estimator="grpo", eps=1e-4)
    values["dynamic_sampling_keep"] = groups_with_signal(rewards, None, group)
    return values


def _groups_agg(dtype: torch.dtype) -> dict[str, Any]:
    rewards, group, lengths = _groups12(dtype)
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    token_loss = -group_advantages(rewards, None, group)[:, None].expand(mask.shape)
    denominators = step_denominators(lengths, group)
    extra = {"group_tokens": group_token_counts(lengths, group)}
    modes = ("token-mean", "prompt-mean-token-mean", "seq-mean-token-mean")
    return {mode: aggregate(token_loss, mask, denominators, mode, **extra) for mode in modes}


def _one_member_failed(dtype: torch.dtype) -> dict[str, Any]:
    rewards = torch.tensor([1.0, torch.nan, 1.0, 0.0], dtype=dtype)
    valid, group = torch.tensor([True, False, True, True]), torch.zeros(4, dtype=torch.int64)
    grpo = group_advantages(rewards, valid, group, estimator="grpo")
    rloo = group_advantages(rewards, valid, group, estimator="rloo")
    alone = group_advantages(rewards, torch.tensor([True, False, False, False]), group, estimator="grpo")
    assert grpo[1] == rloo[1] == 0 and not alone[1:].any()
    as_zero = group_advantages(rewards.nan_to_num(0.0), None, group, estimator="grpo")
    return {
        "zero_reward_wrong": as_zero,
        "survivors_only": grpo[valid],
        "survivors_rloo": rloo[valid],
        "singleton": alone[:1],
    }


def _entropy(dtype: torch.dtype) -> dict[str, Any]:
    logits = torch.tensor(GOLDEN["fixtures"]["vocab5"]["logits"], dtype=dtype)
    temperature = CASES["vocab5/sampling"]["params"]["temperature"]
    return {
        "entropy_T1": entropy_from_logits(logits),
        "entropy_T": entropy_from_logits(logits, temperature=temperature),
    }


def _kl(dtype: torch.dtype) -> dict[str, Any]:
    p, q = (torch.tensor(GOLDEN["fixtures"]["vocab5"][k], dtype=dtype).log_softmax(0) for k in ("logits", "logits_q"))
    estimates = {"k1": kl_k1(q - p), "k2": kl_k2(q - p), "k3": kl_k3(q - p)}
    expectations = {f"expectation_{name}": (p.exp() * value).sum() for name, value in estimates.items()}
    return estimates | expectations | {"exact_kl_pq": expectations["expectation_k3"]}


def _per_token_lag(dtype: torch.dtype) -> dict[str, Any]:
    params = CASES["staleness/per_token"]["params"]
    versions = torch.tensor([params["token_versions"]])
    mask = torch.ones_like(versions, dtype=torch.bool)
    head, tail, span = trajectory_lags(versions, mask, params["v_train"])
    lag = [int(trajectory_lags(versions[:, [t]], mask[:, [t]], params["v_train"])[0]) for t in range(mask.shape[1])]
    return {"head": head[0], "tail": tail[0], "span": span[0], "lag": lag}


def _mixed_versions(dtype: torch.dtype) -> dict[str, Any]:
    params, data = CASES["staleness/core3_mixed_versions"]["params"], core3(dtype)
    versions = torch.tensor(params["token_versions"])
    batch = data.diagnostics_batch(data.correction(), versions=versions, version_train=params["v_train"])
    metrics = step_diagnostics([batch])
    lags = sorted(int(name.split("_")[1]) for name in metrics if name.startswith("lag_") and name.endswith("_rho_mean"))
    assert metrics["lag_head_max"] == 4 and metrics["lag_negative_tokens"] == 0
    return {
        "head": trajectory_lags(versions, data.mask, params["v_train"])[0],
        "lag_values": lags,
        "tokens_per_lag": [metrics[f"lag_{lag}_tokens"] for lag in lags],
        "mean_behaviour_ratio_per_lag": [metrics[f"lag_{lag}_rho_mean"] for lag in lags],
    }


SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
KL = {"kl_beta": 0.04}
GEOMETRIC = {"rejections": ("geometric",), "geometric_low": 0.98, "geometric_high": 1.02}
TRL = {"aggregation": "seq-mean-token-mean"}
DR_GRPO = {"advantage": "group_mean_centred", "length_max": 8.0}

HANDLERS: dict[str, Handler] = {
    "core3/adv": _adv,
    "core3/ratios": _ratios,
    "core3/weights": _weights,
    "core3/ppo_clip_0.2": _loss_case("ppo_clip", **SYMMETRIC),
    "core3/ppo_dual_clip": _loss_case("ppo_dual_clip", **SYMMETRIC),
    "core3/two_sided": _loss_case("two_sided", ratio_max=2.0, **SYMMETRIC),
    "core3/grpo_beta0": _loss_case("grpo", **SYMMETRIC),
    "core3/grpo_beta0.04": _loss_case("grpo", kl_form="k3", **KL, **SYMMETRIC),
    "core3/grpo_unbiased_kl": _loss_case("grpo", kl_form="ratio_k3", **KL, **SYMMETRIC),
    "core3/dr_grpo": _loss_case("dr_grpo", **DR_GRPO, **SYMMETRIC),
    "core3/dapo": _loss_case("dapo", **WIDE),
    "core3/decoupled_untruncated": _loss_case("decoupled", weight="untruncated", **WIDE),
    "core3/decoupled_token_tis": _loss_case("decoupled", weight="token_tis", **WIDE),
    "core3/decoupled_seq_tis": _loss_case("decoupled", weight="sequence_tis", **WIDE),
    "core3/decoupled_icepop": _loss_case("decoupled", weight="token_mis", **WIDE),
    "core3/decoupled_token_mis": _loss_case("decoupled", weight="token_mis", correction={"band_high": 2.0}, **WIDE),
    "core3/decoupled_seq_mis": _loss_case("decoupled", weight="sequence_mis", **WIDE),
    "core3/decoupled_seq_mis_grpo_agg": _loss_case("decoupled", weight="sequence_mis", **TRL, **SYMMETRIC),
    "core3/geo_rs_token_tis_denom_original": _loss_case("decoupled", weight="token_tis", correction=GEOMETRIC, **WIDE),
    "core3/geo_rs_token_tis_denom_kept": _loss_case(
        "decoupled", weight="token_tis", correction=GEOMETRIC, kept_denominator=True, **WIDE
    ),
    "core3/gspo_paper_eps": _loss_case("gspo", clip_low=3e-4, clip_high=4e-4),
    "core3/gspo_wide_eps": _loss_case("gspo", **WIDE),
    "core3/cispo_band": _loss_case("cispo", **WIDE),
    "core3/cispo_upper_only": _loss_case("cispo"),
    "core3/cispo_cap5": _loss_case("cispo_cap"),
    "core3/scalerl": _loss_case("scalerl", advantage="centre_then_batch_std", aggregation="prompt-mean-token-mean"),
    "core3/reinforce_token_is": _loss_case("reinforce_is"),
    "core3/topr": _loss_case("topr", advantage="group_mean_centred"),
    "core3/bypass_ppo_clip": _loss_case("ppo_clip", bypass=True, **WIDE),
    "core3/dppo_kl": _dppo,
    "opsm/sign_rule": _opsm,
    "core3/agg/token-mean": _agg("token-mean"),
    "core3/agg/token-sum": _agg("token-sum"),
    "core3/agg/seq-mean-token-mean": _agg("seq-mean-token-mean"),
    "core3/agg/seq-mean-token-sum": _agg("seq-mean-token-sum"),
    "core3/agg/seq-mean-token-sum-norm": _agg("seq-mean-token-sum-norm"),
    "core3/agg/prompt-mean-token-mean": _agg("prompt-mean-token-mean"),
    "core3/agg/micro_batches": _micro_batches,
    "core3/agg/data_parallel": _data_parallel,
    "core3/diagnostics": _diagnostics,
    "groups12/adv": _groups_adv,
    "groups12/agg": _groups_agg,
    "groups/one_member_failed": _one_member_failed,
    "vocab5/sampling": _entropy,
    "vocab5/kl": _kl,
    "staleness/per_token": _per_token_lag,
    "staleness/core3_mixed_versions": _mixed_versions,
}


@cache
def _computed(case_id: str, dtype: torch.dtype) -> dict[str, Any]:
    return HANDLERS[case_id](dtype)


def _excused(case_id: str, name: str) -> bool:
    return case_id in NOT_COVERED or f"{case_id}:{name}" in NOT_COVERED


ALL = [(case_id, name) for case_id, case in CASES.items() for name in case["expected"]]
COVERED = [(case_id, name) for case_id, name in ALL if case_id in HANDLERS and not _excused(case_id, name)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize(("case_id", "name"), COVERED, ids=[f"{case_id}:{name}" for case_id, name in COVERED])
def test_golden_value_is_reproduced(case_id: str, name: str, dtype: torch.dtype) -> None:
    computed = _computed(case_id, dtype)
    assert name in computed, f"no value computed for {case_id}:{name}"
    error = largest_error(computed[name], expected(case_id, name))
    assert error <= TOLERANCE[dtype], f"{case_id}:{name} is off by {error}"


def test_every_golden_value_is_either_covered_or_excused_with_a_reason() -> None:
    excused = [(case_id, name) for case_id, name in ALL if _excused(case_id, name)]
    assert sorted(COVERED + excused) == sorted(ALL)
    assert set(HANDLERS) | {key.split(":")[0] for key in NOT_COVERED} == set(CASES)
    for key in NOT_COVERED:
        case_id, _, name = key.partition(":")
        assert case_id in CASES and (not name or name in CASES[case_id]["expected"]), f"stale excuse {key}"
        assert name or case_id not in HANDLERS, f"{key} is excused as a whole but has a handler"
    assert (len(CASES), len(ALL), len(COVERED)) == (65, 262, 202)
