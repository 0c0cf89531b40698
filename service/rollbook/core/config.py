"""The configuration: one TOML file into frozen dataclasses, whose fields are declared in ``settings``.

Owns relative paths and the digest of the resolved configuration; what a table may hold is checked in ``tables`` and
``config_checks``. Never reads anything but the one file it is given.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.config_checks import check
from rollbook.core.errors import ConfigError
from rollbook.core.idempotency import digest
from rollbook.core.records import RunRules, ScheduleKind
from rollbook.core.settings import (
    ChaosConfig,
    CheckpointConfig,
    ClusterConfig,
    EnvironmentConfig,
    LearnerConfig,
    LedgerConfig,
    ModelConfig,
    RetentionConfig,
    RunConfig,
    SamplingConfig,
    SandboxConfig,
    ScheduleConfig,
    SecurityConfig,
    SupervisorConfig,
    TaskConfig,
    WorkerConfig,
)
from rollbook.core.tables import apply_override, build


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a run needs."""

    run: RunConfig
    model: ModelConfig
    task: TaskConfig
    learner: LearnerConfig
    workers: tuple[WorkerConfig, ...]
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ledger: LedgerConfig = LedgerConfig()
    security: SecurityConfig = SecurityConfig()
    retention: RetentionConfig = RetentionConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    cluster: ClusterConfig = ClusterConfig()
    chaos: ChaosConfig = ChaosConfig()

    def __post_init__(self) -> None:
        check(self)

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
            infra_failures_max=self.ledger.infra_failures_max,
            infra_window=self.ledger.infra_window,
            breaker_pause_s=self.ledger.breaker_pause_s,
        )

    def to_json(self) -> str:
        """Canonical JSON of the resolved configuration, without what may differ between machines (see ``digest``)."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def digest(self) -> str:
        """sha256 over everything that changes what is computed.

        Left out are addresses, budgets, the cadence of checkpoints, what a fault does, and the places of files, whose content
        a run's record has digests of. So are fields at their defaults: one more field in a later release changes no digest.
        """
        content = _not_default(self)
        content["run"] = {k: v for k, v in content["run"].items() if k in ("id", "seed", "steps")}
        for name in ("on_divergence", "fork_tolerance", "keep_orphans", "rank_timeout_s"):
            content["learner"].pop(name, None)
        for section, name in (
            ("model", "path"), ("task", "path"), ("task", "heldout_path"), ("environment", "tool_s"), ("environment", "score_s"),
            ("environment", "processes"), ("environment", "attempts_max"), ("sandbox", "slots"), ("sandbox", "attempts_max"),
        ):  # fmt: skip
            content.get(section, {}).pop(name, None)
        for section, name in (("task", "reward"), ("environment", "name")):
            if name in content.get(section, {}):
                content[section][name] = portable_code(content[section][name])
        for section in ("environment", "sandbox"):  # with only such fields it is as if it were not there
            if not content.get(section):
                content.pop(section, None)
        for section in ("supervisor", "cluster", "ledger", "security", "checkpoint", "retention", "chaos"):
            content.pop(section, None)
        content["ledger"] = _not_default(self.rules())
        return digest("config", json.dumps(content, sort_keys=True))


FREE = (
    "run.dir", "run.chaos_allowed", "run.health_port", "run.metrics_port", "run.log_format", "run.mirror", "model.path",
    "task.path", "task.heldout_path", "learner.on_divergence",
    "learner.fork_tolerance", "learner.keep_orphans", "learner.rank_timeout_s", "checkpoint.", "retention.", "supervisor.",
    "chaos", "security", "cluster.",
    "ledger.url", "ledger.password_file", "ledger.address", "ledger.heartbeat_s", "ledger.role_ttl_s", "ledger.metrics_port",
    "ledger.status_address", "ledger.group_commit_max", "ledger.payload_bytes_max", "ledger.ordinals_per_partition",
    "ledger.standbys",
    "environment.tool_s", "environment.score_s", "environment.processes", "environment.attempts_max", "sandbox.slots",
)  # fmt: skip
"""Beginnings of the paths that are not part of ``Config.digest``: they may change at any time."""


def with_worker(config: Config, index: int) -> Config:
    """The configuration with as many workers of its last kind as give one the index: a fleet may grow beyond what it names."""
    missing = index + 1 - sum(kind.count for kind in config.workers)
    last = config.workers[-1]
    grown = dataclasses.replace(last, count=last.count + max(0, missing))
    return dataclasses.replace(config, workers=(*config.workers[:-1], grown))


ADAPTERS = ("trl", "verl", "rg", "verifiers")
"""Prefixes of ``environment.name`` under which other libraries' conventions are read."""


def split_adapter(spec: str) -> tuple[str, str]:
    """``"trl:rest"`` to ``("trl", "rest")``; no prefix is ``""``."""
    prefix, colon, rest = spec.partition(":")
    return (prefix, rest) if colon and prefix in ADAPTERS else ("", spec)


def portable_code(spec: str) -> str:
    """The name of some code (``task.reward``, ``environment.name``) without the folder of its file."""
    return _with_file(spec, lambda file: Path(file).name)


def absolute_code(spec: str, folder: Path) -> str:
    """The name of some code with its file's path, which starts at ``folder`` where it is relative."""
    return _with_file(spec, lambda file: str((folder / file).resolve()))


def code_names(spec: str) -> list[str]:
    """Each piece of code that ``environment.name`` names, without its adapter: ``trl:`` takes several, separated by commas."""
    prefix, rest = split_adapter(spec)
    return [name.strip() for name in rest.split(",")] if prefix == "trl" else [rest]


def _with_file(spec: str, change: typing.Callable[[str], str]) -> str:
    """The name of some code with its file changed, where it has one: ``[ADAPTER:]FILE.py[:ATTRIBUTE]``."""
    prefix = split_adapter(spec)[0]
    names = []
    for name in code_names(spec):
        file, colon, attribute = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
        names.append(f"{change(file)}{colon}{attribute}" if file.endswith(".py") else name)
    return f"{prefix}{':' if prefix else ''}{','.join(names)}"


def _not_default(value: typing.Any) -> typing.Any:
    """A dataclass as a table without the fields that are at their defaults."""
    if isinstance(value, tuple):
        return [_not_default(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    out = {}
    for spec in dataclasses.fields(value):
        content = getattr(value, spec.name)
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        if default is dataclasses.MISSING or content != default:
            out[spec.name] = _not_default(content)
    return out


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a TOML file, apply ``a.b=c`` overrides, check, and make its relative paths absolute.

    Raises: ConfigError naming the file, the full key path and the nearest valid key.
    """
    file = Path(path)
    try:
        table = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {file}; name a TOML file, or the directory of a run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    try:
        for assignment in overrides:
            apply_override(table, assignment)
        return _resolve_paths(config_from_table(table), file.resolve().parent)
    except ConfigError as error:
        raise type(error)(f"{file}: {error}") from None


def config_from_table(table: dict) -> Config:
    """A checked configuration from an already parsed table."""
    return typing.cast(Config, build(Config, table, ""))


def config_in(table: dict, folder: Path) -> Config:
    """A checked configuration whose relative paths start at ``folder``. Raises ConfigError."""
    return _resolve_paths(config_from_table(table), folder)


def config_from_json(text: str) -> Config:
    """The configuration stored with a run (``Config.to_json``)."""
    return config_from_table(json.loads(text))


def _resolve_paths(config: Config, base: Path) -> Config:
    def absolute(text: str) -> str:
        return str((base / text).resolve()) if text else ""

    replace = dataclasses.replace
    run = replace(config.run, dir=absolute(config.run.dir))
    reward = _with_file(config.task.reward, absolute)
    environment = replace(config.environment, name=_with_file(config.environment.name, absolute))
    task = replace(config.task, path=absolute(config.task.path), heldout_path=absolute(config.task.heldout_path), reward=reward)
    model = replace(config.model, path=absolute(config.model.path))
    ledger = config.ledger
    url = ledger.url or f"sqlite:///{run.dir}/ledger.sqlite"
    if url.startswith("sqlite:///") and not url.startswith("sqlite:////"):
        url = f"sqlite:///{absolute(url.removeprefix('sqlite:///'))}"
    ledger = replace(ledger, url=url, password_file=absolute(ledger.password_file))
    files = ("certificate", "key", "ca", "client_certificate", "client_key", "tokens", "token_dir")
    security = replace(config.security, **{name: absolute(getattr(config.security, name)) for name in files})
    return replace(config, run=run, task=task, model=model, environment=environment, ledger=ledger, security=security)
