"""The configuration: one TOML file into frozen dataclasses; every field documented where it is declared.

Owns defaults, unknown and missing keys, cross-field checks and the digest of the resolved configuration. Never reads
anything but the one file it is given and never imports a library outside the standard one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.core.errors import ConfigError, UnsupportedSampling
from rollbook.core.idempotency import digest
from rollbook.core.records import RunRules, ScheduleKind


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Identity of the run and where its files live."""

    id: str
    """Name of the run; primary keys in the ledger begin with it."""
    dir: str
    """Run directory: checkpoints, versions, logs, spools. Relative paths start at the configuration file's folder."""
    steps: int
    """Optimizer steps to make in all; running again with more is an accepted revision."""
    seed: int = 0
    """Seed of everything: task order, per-sample seeds, learner RNG."""
    chaos_allowed: bool = False
    """Drills refuse a run that does not say true here."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy's starting point."""

    path: str
    """Local Hugging Face directory (config.json, safetensors, tokenizer)."""
    chat_template: bool = False
    """Render prompts through the tokenizer's chat template as one user message."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Where prompts come from and how completions are judged."""

    source: str
    """``jsonl``, ``parquet`` or ``reasoning_gym``."""
    path: str = ""
    """Task file (jsonl, parquet)."""
    name: str = ""
    """Dataset name (reasoning_gym)."""
    settings: dict = field(default_factory=dict)
    """Settings passed to the procedural dataset (reasoning_gym), for example {min_terms = 2}."""
    size: int = 1000
    """Tasks per epoch of a procedural source."""
    prompt_template: str = "{prompt}"
    """Prompt text; fields of the task in braces."""
    answer_field: str = "answer"
    """Field of a task file that holds the expected answer."""
    answer_pattern: str = ""
    """Regular expression whose first group extracts the answer from the *task's* answer field; empty = all of it."""
    completion_pattern: str = ""
    """Regular expression whose last match's first group is the completion's answer; empty = the whole completion."""
    reward: str = "rollbook.tasks.rewards:exact_match"
    """Reward function as ``module:attribute`` or ``file.py:attribute``."""
    heldout_path: str = ""
    """Task file for greedy evaluation, never trained on; procedural sources use a disjoint seed when empty."""
    heldout_size: int = 200
    """Held-out tasks to evaluate."""
    lookahead_groups: int = 0
    """Unopened groups the feeder keeps waiting; 0 = twice the groups of a step."""
    epochs: int = 0
    """Passes over the tasks, each in its own order; 0 = as many as the steps need."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Which version samples what."""

    kind: str = "bounded"
    """``bounded`` (newest loaded version, lag at most max_lag_versions) or ``fixed`` (exactly lag_versions behind)."""
    max_lag_versions: int = 2
    """Staleness bound of the bounded schedule (P5)."""
    lag_versions: int = 1
    """Lag of the fixed schedule; 0 = synchronous, 1 overlaps generation with training."""


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are drawn. Anything that changes the distribution without the trainer knowing is refused."""

    temperature: float = 1.0
    """Logits are divided by it, in the engine and in the trainer."""
    max_new_tokens: int = 16
    """Longest completion."""
    ignore_eos: bool = False
    """Go on after end of sequence (masks nothing, so log-probs stay right)."""
    top_p: float = 1.0
    """Only 1.0: the engine would renormalise over a set the trainer does not know."""
    top_k: int = 0
    """Only 0 (off), for the same reason."""
    min_p: float = 0.0
    """Only 0.0, for the same reason."""
    min_tokens: int = 0
    """Only 0: it masks end of sequence and renormalises."""
    repetition_penalty: float = 1.0
    """Only 1.0."""
    presence_penalty: float = 0.0
    """Only 0.0."""
    frequency_penalty: float = 0.0
    """Only 0.0."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UnsupportedSampling(
                f"sampling.temperature = {self.temperature}: greedy rows are not samples of the policy; use a value > 0"
            )
        fixed = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0,
                 "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
        for name, only in fixed.items():
            if getattr(self, name) != only:
                raise UnsupportedSampling(
                    f"sampling.{name} = {getattr(self, name)}: only {only} is supported, because the engine would sample "
                    f"from a distribution the trainer does not compute and every importance ratio would be wrong"
                )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One kind of rollout worker; ``[[workers]]`` may stand several times."""

    engine: str
    """``transformers`` or ``vllm``."""
    count: int = 1
    """Processes of this kind."""
    slots: int = 64
    """Slots leased, generated and submitted together."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str = "float32"
    """Forward dtype: float64 (batch-independent on CPU), float32 or bfloat16."""
    threads: int = 1
    """CPU threads of the process; more than one per process spins on shared cores."""
    max_model_len: int = 512
    """Longest prompt plus completion, in tokens."""
    gpu_memory_fraction: float = 0.35
    """Share of the GPU the vLLM engine may take."""
    kv_cache_gib: int = 1
    """KV cache of the vLLM engine on CPU, GiB."""
    enforce_eager: bool = True
    """vLLM without graph capture: quicker start, slower decoding."""
    batch_invariant: bool = False
    """vLLM on CUDA with batch-invariant kernels: a rollout is a function of its key."""
    probe_tolerance: float = 1e-3
    """Largest mean absolute log-prob difference between the engine and the trainer on the version's probe (R18)."""


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """The optimizer step."""

    groups_per_step: int
    """Groups (prompts) a step trains on."""
    group_size: int
    """Rollouts per group; unit of the advantage."""
    minibatches: int = 1
    """Optimizer updates per step, on disjoint parts shuffled by the checkpointed RNG."""
    micro_batch_size: int = 0
    """Sequences per forward; 0 = a whole minibatch. Changes memory, not the loss."""
    objective: str = "decoupled"
    """Name in ``learner.objectives``."""
    clip_low: float = 0.2
    """Lower clip of the policy ratio."""
    clip_high: float = 0.28
    """Upper clip of the policy ratio."""
    correction: str = "token_tis"
    """Weights on pi_old / mu: ``token_tis``, ``none``, … in ``learner.corrections``."""
    rho_max: float = 2.0
    """Cap of the truncated importance weights."""
    advantage: str = "group_mean_centred"
    """Name in ``learner.advantages``."""
    lr: float = 1e-4
    """Peak learning rate."""
    lr_schedule: str = "constant"
    """``constant``, ``linear`` or ``cosine`` after the warm-up, down to ``lr_min_ratio`` at the last step."""
    lr_min_ratio: float = 0.1
    """Final learning rate as a share of ``lr``."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW."""
    beta2: float = 0.95
    """AdamW."""
    eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """AdamW."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str = "float32"
    """Dtype of the master weights and the forward; logits and log-probs are float32 always."""
    autocast: str = ""
    """``bfloat16`` runs the forward under autocast; empty = off."""
    publish_dtype: str = ""
    """Dtype of published weights; empty = ``dtype``."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    threads: int = 1
    """CPU threads of the process."""
    deterministic: bool = True
    """Deterministic kernels: what makes replay bitwise (P4)."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When training state becomes durable."""

    every_steps: int = 10
    """Steps between checkpoints; at most this many steps are replayed after a crash."""
    keep: int = 3
    """Committed checkpoints kept; at least 2."""


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """The ledger server and its database."""

    url: str = ""
    """``sqlite:///FILE`` or ``postgresql+psycopg://…``; empty = ``ledger.sqlite`` in the run directory."""
    address: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one and writes it to the run directory."""
    lease_ttl_s: float = 30.0
    """A slot whose worker is silent this long is leased again."""
    heartbeat_s: float = 5.0
    """Interval of worker heartbeats."""
    role_ttl_s: float = 15.0
    """Term of a fenced role; a standby takes over this long after the holder's last sign of life."""
    attempts_max: int = 3
    """Attempts of one slot before its verdict."""
    survivors_min: int = 0
    """Fewest usable members of a group that is still trained; 0 = max(2, ceil(group_size / 2))."""
    late_submit: str = "salvage"
    """``salvage`` accepts a late sample whose slot is still empty; ``strict`` fences it."""
    straggler: str = "wait"
    """``wait`` (bounded) or ``drop`` for opened groups that would be too stale at the next step."""
    straggler_wait_s: float = 60.0
    """Bound of that wait."""
    group_commit_max: int = 128
    """Operations that share one durable commit."""
    payload_bytes_max: int = 33_554_432
    """Largest sample accepted."""
    ordinals_per_partition: int = 100_000
    """Width of a PostgreSQL partition."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Restarts on one machine."""

    restarts_max: int = 10
    """Deaths of one role within ``restarts_window_s`` after which the run stops with the first cause."""
    restarts_window_s: float = 600.0
    """Window of the restart budget."""
    backoff_s: float = 0.5
    """First wait before a restart; doubles up to ``backoff_max_s``."""
    backoff_max_s: float = 15.0
    """Longest wait before a restart."""
    drain_s: float = 20.0
    """Grace of a graceful stop before SIGKILL."""
    stall_s: float = 600.0
    """No finished step for this long is reported loudly with a stack dump of every role."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a run needs."""

    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    learner: LearnerConfig
    workers: tuple[WorkerConfig, ...]
    schedule: ScheduleConfig = ScheduleConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ledger: LedgerConfig = LedgerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    def __post_init__(self) -> None:
        _check(self)

    def rules(self) -> RunRules:
        """The numbers the ledger enforces."""
        fixed = self.schedule.kind == ScheduleKind.FIXED
        survivors = self.ledger.survivors_min or max(2, math.ceil(self.learner.group_size / 2))
        return RunRules(
            group_size=self.learner.group_size,
            groups_per_step=self.learner.groups_per_step,
            schedule=ScheduleKind(self.schedule.kind),
            max_lag_versions=self.schedule.lag_versions if fixed else self.schedule.max_lag_versions,
            fixed_lag_versions=self.schedule.lag_versions,
            config_seed=self.run.seed,
            lease_ttl_s=self.ledger.lease_ttl_s,
            attempts_max=self.ledger.attempts_max,
            survivors_min=min(survivors, self.learner.group_size),
            late_submit=self.ledger.late_submit,
            straggler=self.ledger.straggler,
            straggler_wait_s=self.ledger.straggler_wait_s,
            tokens_max=max(w.max_model_len for w in self.workers),
            steps=self.run.steps,
        )

    def to_json(self) -> str:
        """Canonical JSON of the resolved configuration, without what may differ between machines (see ``digest``)."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def digest(self) -> str:
        """sha256 over everything that changes what is computed; addresses, paths of the run and budgets are left out."""
        content = dataclasses.asdict(self)
        content["run"] = {k: v for k, v in content["run"].items() if k in ("id", "seed", "steps")}
        for section in ("supervisor", "ledger"):
            content.pop(section)
        content["ledger"] = dataclasses.asdict(self.rules())
        return digest("config", json.dumps(content, sort_keys=True))


def _check(c: Config) -> None:
    """Cross-field checks; each message explains the failure it prevents."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    need(bool(c.run.id) and all(ch.isalnum() or ch in "-_." for ch in c.run.id),
         f"run.id = {c.run.id!r}: use letters, digits, '-', '_' and '.', it becomes part of keys and file names")  # fmt: skip
    need(c.run.steps >= 1, f"run.steps = {c.run.steps}: at least 1")
    need(c.schedule.kind in ("bounded", "fixed"), f"schedule.kind = {c.schedule.kind!r}: 'bounded' or 'fixed'")
    need(c.schedule.max_lag_versions >= 0, "schedule.max_lag_versions must be >= 0")
    need(c.schedule.lag_versions >= 0, "schedule.lag_versions must be >= 0")
    need(c.learner.group_size >= 1 and c.learner.groups_per_step >= 1,
         "learner.group_size and learner.groups_per_step must be >= 1")  # fmt: skip
    need(1 <= c.learner.minibatches <= c.learner.group_size * c.learner.groups_per_step,
         f"learner.minibatches = {c.learner.minibatches}: between 1 and the {c.learner.group_size * c.learner.groups_per_step} "
         "samples of a step, or a minibatch would be empty")  # fmt: skip
    need(c.checkpoint.keep >= 2, "checkpoint.keep must be >= 2: with one, a damaged newest checkpoint has no fallback")
    need(c.checkpoint.every_steps >= 1, "checkpoint.every_steps must be >= 1")
    need(c.ledger.lease_ttl_s > 3 * c.ledger.heartbeat_s,
         f"ledger.lease_ttl_s = {c.ledger.lease_ttl_s} must exceed 3 x ledger.heartbeat_s = {3 * c.ledger.heartbeat_s}, "
         "or one lost heartbeat loses the lease")  # fmt: skip
    need(c.ledger.late_submit in ("salvage", "strict"), f"ledger.late_submit = {c.ledger.late_submit!r}: 'salvage' or 'strict'")
    need(c.ledger.straggler in ("wait", "drop"), f"ledger.straggler = {c.ledger.straggler!r}: 'wait' or 'drop'")
    need(len(c.workers) >= 1 and sum(w.count for w in c.workers) >= 1, "at least one [[workers]] entry with count >= 1 is needed")
    for i, w in enumerate(c.workers):
        need(w.engine in ("transformers", "vllm"), f"workers[{i}].engine = {w.engine!r}: 'transformers' or 'vllm'")
        need(w.slots >= 1, f"workers[{i}].slots must be >= 1")
        need(w.max_model_len > c.sampling.max_new_tokens,
             f"workers[{i}].max_model_len = {w.max_model_len} leaves no room for a prompt beside sampling.max_new_tokens = "
             f"{c.sampling.max_new_tokens}")  # fmt: skip
    need(c.task.source in ("jsonl", "parquet", "reasoning_gym"),
         f"task.source = {c.task.source!r}: 'jsonl', 'parquet' or 'reasoning_gym'")  # fmt: skip
    need(c.task.epochs >= 0, f"task.epochs = {c.task.epochs}: 0 (as many as the steps need) or more")
    if c.task.source == "reasoning_gym":
        need(bool(c.task.name), "task.name is missing: the reasoning_gym dataset to draw from, for example 'chain_sum'")
    else:
        need(bool(c.task.path), f"task.path is missing: the {c.task.source} file to read")


_SHOWN = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "dict": "a table"}


def _value(kind: type, value: object, path: str) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{path} = {value!r}: expected {_SHOWN[kind.__name__]}")
    return value


def _build(cls: type, table: object, path: str) -> object:
    """One dataclass from one TOML table; unknown and missing keys name the full path."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path or 'the file'}: expected a table [{path}]")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"; did you mean {_join(path, near[0])}?" if near else f"; valid keys: {', '.join(fields)}"
            raise ConfigError(f"unknown key {_join(path, key)}{hint}")
    values: dict[str, object] = {}
    for name, spec in fields.items():
        where = _join(path, name)
        if name not in table:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise ConfigError(f"missing key {where}")
            continue
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            values[name] = _build(kind, table[name], where)  # type: ignore[arg-type]
        elif typing.get_origin(kind) is tuple:
            items = table[name]
            if not isinstance(items, list):
                raise ConfigError(f"{where}: expected [[{where}]] tables")
            values[name] = tuple(_build(typing.get_args(kind)[0], t, f"{where}[{i}]") for i, t in enumerate(items))
        else:
            values[name] = _value(typing.get_origin(kind) or kind, table[name], where)  # type: ignore[arg-type]
    return cls(**values)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _set(table: dict, assignment: str) -> None:
    """Apply one ``a.b=c`` override; the value is read as TOML, a bare word as a string."""
    name, sep, text = assignment.partition("=")
    if not sep:
        raise ConfigError(f"--set {assignment!r}: write SECTION.KEY=VALUE")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = name.strip().split(".")
    for parent in parents:
        if isinstance(table, list):
            table = table[int(parent)]
        else:
            table = table.setdefault(parent, {})
    if isinstance(table, list):
        raise ConfigError(f"--set {name}: name one entry, for example {name}.0.KEY")
    table[last] = value


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a TOML file, apply ``a.b=c`` overrides, check, and make its relative paths absolute.

    Raises: ConfigError naming the file, the full key path and the nearest valid key.
    """
    file = Path(path)
    try:
        table = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {file}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    try:
        for assignment in overrides:
            _set(table, assignment)
        return _resolve_paths(config_from_table(table), file.resolve().parent)
    except ConfigError as error:
        raise type(error)(f"{file}: {error}") from None


def config_from_table(table: dict) -> Config:
    """A checked configuration from an already parsed table."""
    return typing.cast(Config, _build(Config, table, ""))


def config_from_json(text: str) -> Config:
    """The configuration stored with a run (``Config.to_json``)."""
    return config_from_table(json.loads(text))


def _resolve_paths(config: Config, base: Path) -> Config:
    def absolute(text: str) -> str:
        return str((base / text).resolve()) if text else ""

    replace = dataclasses.replace
    run = replace(config.run, dir=absolute(config.run.dir))
    reward_place, colon, attribute = config.task.reward.rpartition(":")
    reward = f"{absolute(reward_place)}{colon}{attribute}" if reward_place.endswith(".py") else config.task.reward
    task = replace(config.task, path=absolute(config.task.path), heldout_path=absolute(config.task.heldout_path), reward=reward)
    model = replace(config.model, path=absolute(config.model.path))
    ledger = config.ledger
    url = ledger.url or f"sqlite:///{run.dir}/ledger.sqlite"
    if url.startswith("sqlite:///") and not url.startswith("sqlite:////"):
        url = f"sqlite:///{absolute(url.removeprefix('sqlite:///'))}"
    return replace(config, run=run, task=task, model=model, ledger=replace(ledger, url=url))


def differences(stored_json: str, offered_json: str) -> list[str]:
    """``path: stored -> offered`` for every field in which two resolved configurations differ."""
    out: list[str] = []

    def walk(path: str, a: object, b: object) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                walk(_join(path, key), a.get(key), b.get(key))
        elif a != b:
            out.append(f"{path}: {a!r} -> {b!r}")

    walk("", json.loads(stored_json), json.loads(offered_json))
    return out
