"""What a configuration may say beyond its types: ranges, names, and what only makes sense together.

Owns every check that needs nothing but the configuration itself, so that a wrong value stops a command before it has
created anything. Names that the learner and the engines know are repeated here, because importing them costs seconds; a
test holds the two lists together. Never reads a file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from rollbook.core.errors import ConfigError, UnsupportedSampling
from rollbook.core.security import check_security

if TYPE_CHECKING:
    from rollbook.core.config import Config, LearnerConfig, SamplingConfig, WorkerConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule.kind": ("bounded", "fixed"),
    "ledger.late_submit": ("salvage", "strict"),
    "cluster.workers": ("config", "fill"),
    "ledger.straggler": ("wait", "drop"),
    "run.log_format": ("text", "json"),
    "task.source": ("jsonl", "parquet", "reasoning_gym", "environment"),
    "sandbox.backend": ("auto", "zygote", "bubblewrap", "landlock", "unsafe"),
    "learner.objective": (
        "decoupled", "ppo_clip", "ppo_dual_clip", "two_sided", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "cispo_cap",
        "reinforce_is", "scalerl", "topr", "dppo_kl",
    ),
    "learner.correction": ("none", "untruncated", "token_tis", "sequence_tis", "token_mis", "sequence_mis"),
    "learner.advantage": ("group_mean_centred", "grpo", "rloo", "batch_std", "centre_then_batch_std", "max_rl"),
    "learner.lr_schedule": ("constant", "linear", "cosine"),
    "learner.device": ("cpu", "cuda"),
    "learner.dtype": ("float32", "bfloat16", "float64"),
    "learner.autocast": ("", "bfloat16"),
    "learner.publish_dtype": ("", "float32", "bfloat16", "float64"),
    "learner.on_divergence": ("stop", "fork"),
}  # fmt: skip
"""Fields that hold one of a few names."""

MIRRORS = ("tensorboard", "wandb")
"""Other programs that show the metrics of steps."""

ENGINE_DTYPES = {"transformers": ("float64", "float32", "bfloat16"), "vllm": ("float32", "bfloat16", "float16")}
"""Forward dtypes by engine."""

AT_LEAST: dict[str, float] = {
    "run.steps": 1, "run.seed": 0, "task.size": 1, "task.heldout_size": 0, "task.lookahead_groups": 0, "task.epochs": 0,
    "schedule.max_lag_versions": 0, "schedule.lag_versions": 0, "sampling.max_new_tokens": 1, "checkpoint.every_steps": 1,
    "learner.groups_per_step": 1, "learner.group_size": 1, "learner.minibatches": 1, "learner.micro_batch_size": 0,
    "learner.lr": 0, "learner.warmup_steps": 0, "learner.threads": 1, "learner.ranks": 1, "learner.fork_tolerance": 0,
    "ledger.attempts_max": 1,
    "ledger.survivors_min": 0, "ledger.straggler_wait_s": 0, "ledger.group_commit_max": 1, "ledger.payload_bytes_max": 1,
    "ledger.ordinals_per_partition": 1, "ledger.infra_window": 1, "ledger.infra_failures_max": 0, "ledger.metrics_port": 0,
    "ledger.standbys": 0, "environment.turns_max": 1, "retention.groups": 1, "retention.batch_rows": 1, "retention.events_s": 0,
    "run.health_port": 0, "run.metrics_port": -1,
    "environment.processes": 1, "environment.attempts_max": 1, "sandbox.slots": 2, "sandbox.memory_mb": 32,
    "sandbox.processes": 1, "sandbox.output_kb": 1, "sandbox.disk_mb": 1, "security.message_bytes_max": 2 << 20,
    "security.calls_open_max": 4, "security.calls_waiting_max": 1,
    "cluster.worker_cpus": 0, "cluster.worker_gpus": 0, "cluster.learner_cpus": 0, "cluster.learner_gpus": 0,
    "cluster.server_cpus": 0, "cluster.wait_for_resources_s": 0,
}  # fmt: skip
"""Smallest value of a number."""

POSITIVE = (
    "checkpoint.mtbf_s", "ledger.heartbeat_s", "ledger.role_ttl_s", "ledger.lease_ttl_s", "learner.grad_clip", "learner.rho_max",
    "learner.rank_timeout_s",
    "ledger.breaker_pause_s", "security.calls_per_s_max", "retention.every_s", "environment.tool_s", "environment.score_s",
    "sandbox.cpu_s", "sandbox.wall_s", "cluster.place_s", "cluster.unreachable_s", "cluster.orphan_s", "supervisor.startup_s",
    "supervisor.busy_s", "supervisor.idle_s",
)  # fmt: skip
"""Numbers that must exceed 0."""

WORKER_AT_LEAST = {"count": 0, "slots": 1, "threads": 1, "max_model_len": 2}
IDLE_S_MIN = 15.0
"""Least ``supervisor.idle_s`` of a run that is no drill: a call that is not answered ends after 12 s at the latest."""
SLOTS_MAX = 4096
"""Most slots that one lease call grants."""
SEED_MAX = 2**63 - 1
RECEIPTS_S_MIN = 600.0
"""Longer than any client repeats a call."""

ONLY: dict[str, float] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""Sampling settings with a single supported value."""


def need(ok: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``ok``."""
    if not ok:
        raise ConfigError(message)


def check_sampling(s: SamplingConfig) -> None:
    """Refuse what makes recorded log-probs wrong. Raises UnsupportedSampling."""
    if not (math.isfinite(s.temperature) and s.temperature > 0):
        raise UnsupportedSampling(
            f"sampling.temperature = {s.temperature}: greedy rows are not samples of the policy; use a value > 0"
        )
    for name, only in ONLY.items():
        if getattr(s, name) != only:
            raise UnsupportedSampling(
                f"sampling.{name} = {getattr(s, name)}: only {only} is supported, because the engine would sample "
                f"from a distribution the trainer does not compute and every importance ratio would be wrong"
            )


def check(c: Config) -> None:
    """Every check; each message names the field and explains the failure it prevents. Raises ConfigError."""
    _check_numbers(c)
    for path, names in CHOICES.items():
        value = _at(c, path)
        shown = ", ".join(repr(name) for name in names)
        need(value in names, f"{path} = {value!r}: one of {shown}")
    need(bool(c.run.id) and all(ch.isalnum() or ch in "-_." for ch in c.run.id),
         f"run.id = {c.run.id!r}: use letters, digits, '-', '_' and '.', it becomes part of keys and file names")  # fmt: skip
    need(bool(c.run.dir), "run.dir is empty: name the directory that keeps checkpoints, versions, logs and spools")
    need(c.run.seed <= SEED_MAX, f"run.seed = {c.run.seed}: at most 2**63 - 1")
    need(c.run.chaos_allowed or not c.chaos.failpoints,
         f"chaos.failpoints = {c.chaos.failpoints!r}: this run does not allow faults; set run.chaos_allowed = true if its "
         "processes may be killed on purpose")  # fmt: skip
    _check_learner(c.learner)
    need(c.learner.ranks == 1 or c.learner.rank_timeout_s < c.supervisor.busy_s,
         f"learner.rank_timeout_s = {c.learner.rank_timeout_s}: below supervisor.busy_s = {c.supervisor.busy_s}, or the learner "
         "would be ended as hung before it could name the rank")  # fmt: skip
    need(not (c.learner.keep_orphans and c.schedule.kind == "fixed"),
         "learner.keep_orphans = true: in the fixed schedule the path through a fork is always longer than "
         "schedule.lag_versions")  # fmt: skip
    need(c.checkpoint.keep >= 2, "checkpoint.keep must be >= 2: with one, a damaged newest checkpoint has no fallback")
    need(not c.retention.enabled or c.retention.receipts_s >= RECEIPTS_S_MIN,
         f"retention.receipts_s = {c.retention.receipts_s}: at least {RECEIPTS_S_MIN:g}: clients repeat a call for "
         "minutes, and a repeated one must still be known")  # fmt: skip
    need(c.ledger.lease_ttl_s > 3 * c.ledger.heartbeat_s,
         f"ledger.lease_ttl_s = {c.ledger.lease_ttl_s} must exceed 3 x ledger.heartbeat_s = {3 * c.ledger.heartbeat_s}, "
         "or one lost heartbeat loses the lease")  # fmt: skip
    need(bool(c.environment.name) or not c.environment.settings,
         "environment.settings are given, but environment.name is empty: name the environment that takes them")  # fmt: skip
    _check_addresses(c.ledger.addresses, c.ledger.standbys)
    need(not c.ledger.standbys or bool(c.ledger.addresses) or c.ledger.address.endswith(":0"),
         f"ledger.standbys = {c.ledger.standbys}: servers cannot share ledger.address = {c.ledger.address!r}; end it in :0, or "
         "list an address for each under ledger.addresses")  # fmt: skip
    need(c.run.chaos_allowed or c.supervisor.idle_s >= IDLE_S_MIN,
         f"supervisor.idle_s = {c.supervisor.idle_s}: at least {IDLE_S_MIN:.0f}, or a role whose call runs into its deadline is "
         "taken for hung")  # fmt: skip
    last_port = c.run.health_port + 2 + sum(w.count for w in c.workers) + c.ledger.standbys
    need(last_port < 2**16, f"run.health_port = {c.run.health_port}: the last role's port would be {last_port}; at most 65535")
    last_port += c.run.metrics_port - c.run.health_port
    need(last_port < 2**16, f"run.metrics_port = {c.run.metrics_port}: the last role's port would be {last_port}; at most 65535")
    for name in c.run.mirror:
        need(name in MIRRORS, f"run.mirror: {name!r} is none of {', '.join(MIRRORS)}")
    host, _, port = c.ledger.status_address.rpartition(":")
    need(not c.ledger.status_address or (bool(host) and port.isdecimal() and int(port) < 2**16),
         f"ledger.status_address = {c.ledger.status_address!r}: write host:port, as 127.0.0.1:0; empty = no page")  # fmt: skip
    need(c.ledger.metrics_port < 2**16, f"ledger.metrics_port = {c.ledger.metrics_port}: at most 65535; 0 shows no metrics")
    check_security(c)
    for index, worker in enumerate(c.workers):
        _check_worker(worker, f"workers[{index}]", c.sampling.max_new_tokens)
    need(sum(w.count for w in c.workers) >= 1, "at least one [[workers]] entry with count >= 1 is needed")
    if c.task.source == "reasoning_gym":
        need(bool(c.task.name), "task.name is missing: the reasoning_gym dataset to draw from, for example 'chain_sum'")
    elif c.task.source == "environment":
        need(bool(c.environment.name), "environment.name is missing: task.source = 'environment' takes its tasks from it; write "
             "module:attribute, file.py:attribute, or the name of an installed environment")  # fmt: skip
    else:
        need(bool(c.task.path), f"task.path is missing: the {c.task.source} file to read")


def _check_addresses(addresses: tuple[str, ...], standbys: int) -> None:
    for index, address in enumerate(addresses):
        host, _, port = address.rpartition(":")
        need(bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
             f"ledger.addresses[{index}] = {address!r}: write host:port with the port that clients dial, for example "
             "10.0.0.5:7001")  # fmt: skip
    need(len(set(addresses)) == len(addresses), f"ledger.addresses = {list(addresses)}: one of them is listed twice")
    need(not addresses or len(addresses) > standbys,
         f"ledger.addresses lists {len(addresses)} servers, ledger.standbys = {standbys} needs {standbys + 1}: the holder and "
         "each standby have one")  # fmt: skip


def _at(c: Config, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(c, section), name)


def _check_numbers(c: Config) -> None:
    sections = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "workers"}
    sections |= {f"workers[{index}]": worker for index, worker in enumerate(c.workers)}
    for section, values in sections.items():
        for f in dataclasses.fields(values):
            value = getattr(values, f.name)
            need(not isinstance(value, float) or math.isfinite(value), f"{section}.{f.name} = {value}: must be a finite number")
    every = c.checkpoint.every_steps
    need(every == "auto" or isinstance(every, int), f"checkpoint.every_steps = {every!r}: a number of steps, or 'auto'")
    for path, least in AT_LEAST.items():
        value = _at(c, path)
        need(value == "auto" or value >= least, f"{path} = {value}: must be at least {least}")
    for path in POSITIVE:
        need(_at(c, path) > 0, f"{path} = {_at(c, path)}: must exceed 0")


def _check_learner(s: LearnerConfig) -> None:
    samples = s.group_size * s.groups_per_step
    need(s.minibatches <= samples,
         f"learner.minibatches = {s.minibatches}: between 1 and the {samples} samples of a step, or a minibatch would be "
         "empty")  # fmt: skip
    minibatch = samples // s.minibatches
    parts = math.ceil(minibatch / (s.micro_batch_size or math.ceil(minibatch / s.ranks)))
    need(s.ranks <= parts,
         f"learner.ranks = {s.ranks}: a minibatch of {minibatch} samples has {parts} micro-batches of at most "
         f"{s.micro_batch_size or math.ceil(minibatch / s.ranks)}, so ranks would have nothing to do; lower learner.ranks or "
         "learner.micro_batch_size")  # fmt: skip


def _check_worker(w: WorkerConfig, where: str, max_new_tokens: int) -> None:
    for name, least in WORKER_AT_LEAST.items():
        need(getattr(w, name) >= least, f"{where}.{name} = {getattr(w, name)}: must be at least {least}")
    need(w.slots <= SLOTS_MAX, f"{where}.slots = {w.slots}: one lease call grants at most {SLOTS_MAX}; raise {where}.count")
    need(w.engine in ENGINE_DTYPES, f"{where}.engine = {w.engine!r}: 'transformers' or 'vllm'")
    need(w.device in ("cpu", "cuda"), f"{where}.device = {w.device!r}: 'cpu' or 'cuda'")
    dtypes = ENGINE_DTYPES[w.engine]
    other = [engine for engine, known in ENGINE_DTYPES.items() if w.dtype in known]
    hint = f"; {w.dtype} is computed by engine = {other[0]!r}" if other else ""
    need(w.dtype in dtypes, f"{where}.dtype = {w.dtype!r}: the {w.engine} engine computes in {', '.join(dtypes)}{hint}")
    need(not w.batch_invariant or (w.engine, w.device) == ("vllm", "cuda"),
         f"{where}.batch_invariant = true needs engine = 'vllm' and device = 'cuda'; on CPU use engine = 'transformers', "
         "dtype = 'float64'")  # fmt: skip
    need(w.max_model_len > max_new_tokens,
         f"{where}.max_model_len = {w.max_model_len} leaves no room for a prompt beside sampling.max_new_tokens = "
         f"{max_new_tokens}")  # fmt: skip
