"""One optimizer step, and everything that must survive a crash between two of them.

Owns the order of a step: minibatches drawn, pi_old for the whole step before the first update, advantages over valid
members, corrections on rho = pi_old / mu, then one AdamW update per minibatch. Never talks to the ledger and never writes
a file. Upholds P4: the step is a function of (state, batch, configuration), and ``state_dict`` holds that whole state.

A step whose loss or gradient is not finite changes nothing but the step counter: weights, optimizer and the minibatch
generator are put back bit for bit. The outcome says so, and replay obeys it (R8).

With one minibatch pi_old is pi_theta before the only update, so the training forward pass serves as both; with more, a
pass of its own runs first, split into the same micro-batches.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rollbook.core.changes import differences
from rollbook.core.config import Config
from rollbook.core.errors import CheckpointDamaged, ConfigError, ConfigMismatch, InvalidRequest
from rollbook.core.host import host
from rollbook.core.idempotency import digest, genesis_digest
from rollbook.core.records import PlanOutcome
from rollbook.learner import rng
from rollbook.learner.advantages import group_advantages, groups_with_signal
from rollbook.learner.aggregation import Denominators, group_token_counts, step_denominators
from rollbook.learner.collate import StepBatch
from rollbook.learner.corrections import CorrectionSettings, correct
from rollbook.learner.diagnostics import DiagnosticsAccumulator, DiagnosticsBatch
from rollbook.learner.model import Policy
from rollbook.learner.objectives import OBJECTIVES, PolicyBatch, objective_settings, policy_loss
from rollbook.learner.optimizer import (
    adamw,
    load_optimizer,
    optimizer_tensors,
    optimizer_values,
    set_hyperparameters,
)
from rollbook.learner.schedule import learning_rate
from rollbook.learner.sharing import Ranks, ranks_in_turn
from rollbook.learner.showing import show_phases, show_ratios
from rollbook.learner.snapshot import Snapshot
from rollbook.learner.state import Progress, TrainingState, tensors_digest
from rollbook.observe.failpoints import failpoint
from rollbook.observe.progress import mark as mark_progress

_BUILT_IN = ("device", "dtype", "autocast", "publish_dtype", "gradient_checkpointing", "deterministic", "threads", "ranks")
"""Settings that are part of the loaded policy, of the process, or of the processes that train together."""


@dataclass(frozen=True)
class StepResult:
    """How a step ended; ``metrics`` is JSON-able (a value that is not finite is None)."""

    outcome: PlanOutcome
    reason: str
    metrics: dict[str, Any]


@dataclass(frozen=True)
class _Update:
    """What one optimizer update reports."""

    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Trainer:
    """The policy with its optimizer, generators and progress; one instance trains one lineage."""

    def __init__(self, policy: Policy, config: Config, ranks: Ranks | None = None) -> None:
        """Start from the policy as given, at step 0, with every generator seeded from the run's seed.

        Args:
            policy: to train.
            config: to train under.
            ranks: who shares the work; left out, this process does all of it, with the arithmetic of ``learner.ranks``.

        Raises:
            ConfigError: unknown objective, correction, estimator or schedule, or settings that contradict each other.
        """
        self.policy = policy
        self.progress = Progress(chain_digest=genesis_digest(config.run.id, config.run.seed))
        self._built = config.learner
        self._phases = dict.fromkeys(("reference_logprob", "forward_backward", "optimizer"), 0.0)
        self._ranks = ranks or ranks_in_turn(config.learner.ranks)
        self.optimizer = adamw(policy.model.named_parameters(), config.learner)
        self._before = Snapshot()
        self.use(config)
        rng.seed_globals(config.run.seed)
        self._order = torch.Generator().manual_seed(int(digest("minibatches", config.run.seed)[:15], 16))

    def use(self, config: Config) -> None:
        """Train the following steps under this configuration (an accepted revision holds from the first unplanned step, R15)."""
        settings = config.learner
        objective = OBJECTIVES.get(settings.objective)
        if objective is None:
            raise ConfigError(f"learner.objective = {settings.objective!r}: one of {', '.join(sorted(OBJECTIVES))}")
        if not objective.takes_weights and settings.correction != "none":
            raise ConfigError(
                f"learner.objective = {settings.objective!r} has the ratio over the behaviour policy in it; "
                "learner.correction must be 'none', or the ratio would count twice"
            )
        limits: dict[str, object] = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
        if not objective.takes_weights:
            limits["cap"] = settings.rho_max
        self._objective = objective_settings(settings.objective, length_max=float(config.sampling.max_new_tokens), **limits)
        self._correction = CorrectionSettings(weight=settings.correction, cap=settings.rho_max)
        self._takes_weights = objective.takes_weights
        learning_rate(settings, 1, config.run.steps)
        self.policy.temperature = config.sampling.temperature
        self.config = config
        set_hyperparameters(self.optimizer, settings)

    def train_step(self, batch: StepBatch) -> StepResult:
        """Make the next step from a collated plan, or skip it with a reason; moves ``progress.step`` either way.

        Raises:
            InvalidRequest: the batch is not the next step's.
        """
        step = self.progress.step + 1
        if batch.version_train != self.progress.version:
            raise InvalidRequest(f"the batch trains from version {batch.version_train}, the weights are {self.progress.version}")
        started = host().monotonic()
        metrics = self._batch_metrics(batch) | {"lr": self._set_learning_rate(step)}
        reason = "" if batch.n_tokens else "no trainable token"
        if not reason:
            self._phases = dict.fromkeys(self._phases, 0.0)
            reason = self._update_all(batch, metrics)
            show_phases(self._phases)
        if not reason:
            self._count(batch)
        metrics["seconds_step"] = host().monotonic() - started
        self._advance(step, skipped=bool(reason))
        outcome = PlanOutcome.SKIPPED if reason else PlanOutcome.TRAINED
        return StepResult(outcome, reason, {name: _json_number(value) for name, value in metrics.items()})

    def skip_step(self) -> None:
        """Take the next step as skipped, because its stored outcome says so."""
        self._set_learning_rate(self.progress.step + 1)
        self._advance(self.progress.step + 1, skipped=True)

    def note(self, **changes: Any) -> None:
        """Replace fields of ``progress`` that others decide: lineage, digests, cursor copy."""
        self.progress = replace(self.progress, **changes)

    def require_same_arithmetic(self, config: Config) -> None:
        """Refuse to train a step under settings the policy was not built with.

        Raises:
            ConfigMismatch: naming the settings.
        """
        changed = [name for name in _BUILT_IN if getattr(config.learner, name) != getattr(self._built, name)]
        if changed:
            raise ConfigMismatch(
                f"learner.{', learner.'.join(changed)} changed while planned steps are not yet in a checkpoint: start once with "
                "the former settings and stop with SIGTERM, which commits a checkpoint; then change them"
            )

    def _set_learning_rate(self, step: int) -> float:
        lr = learning_rate(self.config.learner, step, self.config.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _advance(self, step: int, *, skipped: bool) -> None:
        self.progress = replace(self.progress, step=step, version=step, steps_skipped=self.progress.steps_skipped + int(skipped))

    def _count(self, batch: StepBatch) -> None:
        done = self.progress
        self.progress = replace(
            done,
            samples_trained=done.samples_trained + int(batch.valid.sum()),
            tokens_trained=done.tokens_trained + batch.n_tokens,
            ordinal_max=max(done.ordinal_max, int(batch.group_ids.max())),
        )

    def _update_all(self, batch: StepBatch, metrics: dict[str, Any]) -> str:
        """Every update of the step; returns why it was skipped, or nothing."""
        settings = self.config.learner
        order_before = self._order.get_state()
        parts = self._draw_minibatches(batch)
        if len(parts) > 1:
            self._keep()
        advantages = group_advantages(batch.rewards, batch.valid, batch.group_ids, estimator=settings.advantage).float()
        began = host().monotonic()
        old = self._old_logprobs(batch, parts) if len(parts) > 1 else None
        self._phases["reference_logprob"] += host().monotonic() - began if len(parts) > 1 else 0.0
        limits = {"cap": settings.rho_max, "clip_low": settings.clip_low, "clip_high": settings.clip_high}
        diagnostics = {rank: DiagnosticsAccumulator(**limits, device=self.policy.device) for rank in self._ranks.here}
        updates = []
        for position, rows in enumerate(parts):
            if position:
                failpoint("learner.mid_step")
            update = self._update(batch, rows, advantages, old, diagnostics)
            updates.append(update)
            if not update.finite:
                self._put_back(order_before, updated=position > 0)
                return f"minibatch {position + 1} of {len(parts)}: loss {update.loss}, gradient norm {update.grad_norm}"
        merged = self._ranks.merge(list(diagnostics.values()))
        metrics |= merged.result()
        show_ratios(merged, metrics)
        metrics |= {
            "loss": sum(update.loss for update in updates) / len(updates),
            "grad_norm": max(update.grad_norm for update in updates),
            "minibatches": len(updates),
            "behaviour_missing_tokens": batch.behaviour_missing,
        }
        return ""

    def _draw_minibatches(self, batch: StepBatch) -> list[Tensor]:
        """Disjoint parts of the batch with at least one trainable token; rows of a part are in plan order."""
        order = torch.randperm(len(batch), generator=self._order)
        parts = [part.sort().values for part in order.tensor_split(self.config.learner.minibatches)]
        return [part for part in parts if bool(batch.mask[part].any())]

    def _micro_batches(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self.config.learner.micro_batch_size or math.ceil(len(rows) / self._ranks.n))

    def _share(self, rows: Tensor, rank: int) -> tuple[Tensor, ...]:
        """The micro-batches of a minibatch that belong to a rank."""
        return self._micro_batches(rows)[rank :: self._ranks.n]

    @torch.no_grad()
    def _old_logprobs(self, batch: StepBatch, parts: list[Tensor]) -> Tensor:
        """[N, T] log-probs under the weights at the start of the step, split as the updates will split them.

        Rows that other ranks update are 0: nobody here reads them.
        """
        old = torch.zeros(batch.mask.shape, dtype=torch.float32, device=self.policy.device)
        for micro in (micro for rows in parts for rank in self._ranks.here for micro in self._share(rows, rank)):
            mark_progress()
            part = batch.select(micro)
            logprobs, _ = self.policy.completion_logprobs(part.token_ids, part.prompt_lengths, part.mask)
            old = old.to(logprobs.dtype)
            old[micro.to(old.device), : logprobs.shape[1]] = logprobs
        return old

    def _update(
        self, batch: StepBatch, rows: Tensor, advantages: Tensor, old: Tensor | None,
        diagnostics: dict[int, DiagnosticsAccumulator],
    ) -> _Update:  # fmt: skip
        """Gradient of one minibatch over all its micro-batches, then one optimizer step if it is finite."""
        counts = batch.mask[rows].sum(1)
        denominators = step_denominators(counts, batch.group_ids[rows])
        group_tokens = dict(zip(rows.tolist(), group_token_counts(counts, batch.group_ids[rows]).tolist(), strict=True))
        self.optimizer.zero_grad(set_to_none=True)

        def share(rank: int) -> float:
            loss = 0.0
            for micro in self._share(rows, rank):
                mark_progress()
                part = batch.select(micro)
                if part.n_tokens:
                    of_group = torch.tensor([group_tokens[row] for row in micro.tolist()], device=self.policy.device)
                    of_old = None if old is None else old[micro.to(old.device), : part.mask.shape[1]]
                    loss += self._backward(part, advantages[micro], of_old, of_group, denominators, diagnostics[rank])
            return loss

        began = host().monotonic()
        loss = self._ranks.sum(list(self.policy.model.parameters()), share)
        done = host().monotonic()
        self._phases["forward_backward"] += done - began
        parameters = [p for p in self.policy.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.config.learner.grad_clip))
        update = _Update(loss, norm)
        if update.finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._phases["optimizer"] += host().monotonic() - done
        return update

    def _backward(
        self,
        part: StepBatch,
        advantages: Tensor,
        old: Tensor | None,
        group_tokens: Tensor,
        denominators: Denominators,
        diagnostics: DiagnosticsAccumulator,
    ) -> float:
        device = self.policy.device
        theta, entropy = self.policy.completion_logprobs(part.token_ids, part.prompt_lengths, part.mask, with_entropy=True)
        old = theta.detach() if old is None else old
        mu, mask = part.behaviour_logprobs.to(device), part.mask.to(device)
        correction = correct(old, mu, mask, self._correction)
        advantages = advantages.to(device)
        result = policy_loss(
            PolicyBatch(
                logp_theta=theta, logp_old=old, logp_mu=mu, advantages=advantages, mask=mask, group_tokens=group_tokens,
                weights=correction.weights if self._takes_weights else None, keep=correction.keep,
            ),
            denominators,
            self._objective,
        )  # fmt: skip
        result.loss.backward()
        diagnostics.add(
            DiagnosticsBatch(
                logp_theta=theta.detach(), logp_old=old, logp_mu=mu, weights=correction.weights, advantages=advantages,
                mask=mask, keep=correction.keep, entropy=entropy, versions=part.versions.to(device),
                version_train=part.version_train,
            )
        )  # fmt: skip
        return float(result.loss.detach())

    def _keep(self) -> None:
        """Copy everything an update changes."""
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        self._before.take([*self.policy.model.parameters(), *moments])

    def _put_back(self, order: Tensor, *, updated: bool) -> None:
        """Undo the step: the generator of the minibatch order, and every update already made."""
        self._order.set_state(order)
        if not updated:
            return
        self._before.put_back()
        for parameter, state in list(self.optimizer.state.items()):
            # Moments that the first update of the run created inside this step have nothing to go back to.
            if not all(self._before.holds(tensor) for tensor in state.values()):
                del self.optimizer.state[parameter]

    def _batch_metrics(self, batch: StepBatch) -> dict[str, Any]:
        rewards = batch.rewards[batch.valid]
        lengths = batch.attention_mask.sum(1) - batch.prompt_lengths
        groups = torch.unique(batch.group_ids)
        with_signal = groups_with_signal(batch.rewards, batch.valid, batch.group_ids)
        expected = len(groups) * self.config.learner.group_size
        return {
            "reward_mean": float(rewards.mean()) if len(rewards) else None,
            "reward_std": float(rewards.std(correction=0)) if len(rewards) else None,
            "samples": len(batch),
            "samples_valid": int(batch.valid.sum()),
            "samples_failed": expected - int(batch.valid.sum()),
            "groups": len(groups),
            "groups_with_signal": int(torch.unique(batch.group_ids[with_signal]).numel()),
            "tokens": batch.n_tokens,
            "tokens_total": int(batch.attention_mask.sum()),
            "completion_tokens_mean": float(lengths.double().mean()) if len(batch) else None,
            "completion_tokens_max": int(lengths.max()) if len(batch) else None,
            "behaviour_missing_tokens": batch.behaviour_missing,
        }

    def state_dict(self) -> TrainingState:
        """Everything the next step depends on, as CPU tensors and JSON-able values."""
        return TrainingState(
            tensors={
                "model": {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.policy.named_tensors()},
                "optimizer": optimizer_tensors(self.optimizer),
            },
            values={
                "config_digest": self.config.digest(),
                "config_json": self.config.to_json(),
                "optimizer": optimizer_values(self.optimizer),
                "schedule": self._schedule(self.progress.step),
                "rng": rng.capture_globals() | {"minibatches": rng.encode(self._order.get_state())},
                "progress": self.progress.to_values(),
            },
        )

    def load_state_dict(self, state: TrainingState) -> None:
        """Continue exactly where ``state`` was taken.

        Raises:
            ConfigMismatch: the state was taken under another configuration than the one in use (see ``use``).
            CheckpointDamaged: a part is missing or contradicts another; nothing can be trained from it.
        """
        missing = {"config_digest", "config_json", "optimizer", "schedule", "rng", "progress"} - set(state.values)
        if missing or set(state.tensors) != {"model", "optimizer"}:
            raise CheckpointDamaged(f"the state lacks {sorted(missing)}; tensors: {sorted(state.tensors)}")
        if found := differences(state.values["config_json"], self.config.to_json()):
            raise ConfigMismatch(f"the state was taken under another configuration: {'; '.join(found)}")
        progress = Progress.from_values(state.values["progress"])
        _check_progress(progress)
        if state.values["schedule"] != self._schedule(progress.step):
            raise CheckpointDamaged(f"schedule position {state.values['schedule']} is not the one of step {progress.step}")
        self._load_model(state.tensors["model"])
        load_optimizer(self.optimizer, state.tensors["optimizer"], state.values["optimizer"])
        globals_ = dict(state.values["rng"])
        if "minibatches" not in globals_:
            raise CheckpointDamaged("the state lacks the generator of the minibatch order")
        self._order.set_state(rng.decode(globals_.pop("minibatches")))
        rng.restore_globals(globals_)
        self.progress = progress

    @torch.no_grad()
    def _load_model(self, tensors: dict[str, Tensor]) -> None:
        own = dict(self.policy.named_tensors())
        if own.keys() != tensors.keys():
            raise CheckpointDamaged(f"model tensors differ in name: {sorted(own.keys() ^ tensors.keys())[:5]}")
        for name, tensor in own.items():
            stored = tensors[name]
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise CheckpointDamaged(f"model tensor {name!r}: {stored.dtype} {tuple(stored.shape)} does not fit this model")
            tensor.copy_(stored)

    def _schedule(self, step: int) -> dict[str, Any]:
        settings, steps = self.config.learner, self.config.run.steps
        return {
            "kind": settings.lr_schedule,
            "steps": steps,
            "position": step,
            "lr_next": learning_rate(settings, step + 1, steps),
        }


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _held(trainer: Trainer) -> list[Tensor]:
    moments = [tensor for state in trainer.optimizer.state.values() for tensor in state.values()]
    return [tensor.detach() for tensor in (*(t for _, t in trainer.policy.named_tensors()), *moments)]


def fingerprint(trainer: Trainer) -> str:
    """A cheap word for the bits of weights and moments: equal ones have the same, other ones hardly ever."""
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in _held(trainer):
        words = tensor.contiguous().reshape(-1).view(_WORDS[tensor.itemsize])
        sums.setdefault(tensor.device, []).append(words.sum(dtype=torch.int64))
    return digest("fingerprint", *(json.dumps(torch.stack(of_device).tolist()) for of_device in sums.values()))[:16]


def weights_held(trainer: Trainer) -> str:
    """sha256 hex over weights, buffers and moments."""
    return tensors_digest(dict(trainer.policy.named_tensors()) | optimizer_tensors(trainer.optimizer))


def _check_progress(progress: Progress) -> None:
    """Refuse a progress record that contradicts itself."""
    if progress.version != progress.step:
        raise CheckpointDamaged(f"version {progress.version} after step {progress.step}: step s produces version s")
    if progress.cursor is not None and progress.cursor.next_ordinal <= progress.ordinal_max:
        raise CheckpointDamaged(
            f"the cursor copy stands at ordinal {progress.cursor.next_ordinal}, yet ordinal {progress.ordinal_max} was trained"
        )


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
