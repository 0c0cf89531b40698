"""What a role process shows of itself over HTTP while it lives: its metrics page, announced in the run directory.

Owns which port that is and what a ledger server's page knows beside its ledger. Never counts anything (``observe``). A port that
is taken costs neither the role nor, where a free one is to be had, the page: the run directory tells where it has moved. A ledger
server's ``/sd`` moves with its page.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError
from rollbook.core.host import incarnation
from rollbook.observe import failures, targets
from rollbook.observe.devices import WORKER_CLOCK, GpuCollector, Settling, open_nvml
from rollbook.observe.engine_metrics import EngineCollector
from rollbook.observe.exporter import MetricsPage
from rollbook.observe.ledger_metrics import LedgerCollector, Surroundings
from rollbook.observe.metrics import REGISTRY, expose, recovered
from rollbook.observe.pages import LOOPBACK
from rollbook.supervise.control import WORKERS_MAX, read_orders, read_restarts

if TYPE_CHECKING:
    from rollbook.ledger.ledger import Ledger

OFF = -1
SINGLE = ("ledger", "feeder", "learner")
"""Roles whose ports come first, one each."""
ENV_CHARS_MAX = 64

log = logging.getLogger(__name__)


def place_of(config: Config, role: str, index: int) -> int:
    """Position of a process among the ports of its run: ledger, feeder, learner, the workers, then standbys."""
    if role == "worker":
        return len(SINGLE) + index
    if index:
        return len(SINGLE) - 1 + sum(kind.count for kind in config.workers) + index
    return SINGLE.index(role)


def metrics_port(config: Config, role: str, index: int) -> int:
    """Port of a process' page: 0 = any free one, -1 = no page."""
    if role == "ledger" and not index and config.ledger.metrics_port:
        return config.ledger.metrics_port
    base = config.run.metrics_port
    return base + place_of(config, role, index) if base > 0 else base


@contextmanager
def shown_metrics(
    config: Config, role: str, name: str, index: int, find_targets: Callable[[], Sequence[dict[str, Any]]] | None = None
) -> Iterator[None]:
    """Show the metrics of this process for the length of the block, unless configured not to."""
    port = metrics_port(config, role, index)
    if port == OFF:
        yield
        return
    expose(role, config_sha=config.digest()[:16], version=_version())
    _show_devices(role)
    setting = "ledger.metrics_port" if role == "ledger" and config.ledger.metrics_port else "run.metrics_port"
    page = _page(port, find_targets, setting)
    if page is None:
        yield
        return
    target = targets.Target(name, role, socket.gethostname(), f"{LOOPBACK}:{page.port}", incarnation())
    targets.announce(config.run.dir, target)
    log.info("metrics", extra={"event": "metrics_served", "port": page.port})
    try:
        yield
    finally:
        targets.withdraw(config.run.dir, target)
        page.close()


def _page(port: int, find_targets: Callable[[], Sequence[dict[str, Any]]] | None, setting: str) -> MetricsPage | None:
    """The page at this port, else at a free one, else none."""
    for wanted in dict.fromkeys((port, 0)):
        try:
            page = MetricsPage(wanted, REGISTRY, targets=find_targets, setting=setting)
        except ConfigError as error:
            log.error("no metrics are shown there: %s", error, extra={"event": "metrics_unserved", "port": wanted})
        else:
            return page
    return None


@contextmanager
def shown_ledger(config: Config, ledger: Ledger, index: int) -> Iterator[None]:
    """The same for the server that holds the run's role: with what the run's rows say, and where the others show theirs."""
    if metrics_port(config, "ledger", index) == OFF:
        yield
        return
    collector = LedgerCollector(ledger.reading, surroundings(config, ledger))
    REGISTRY.register(collector)
    beat_s = silence_s(config)

    def find_targets() -> Sequence[dict[str, Any]]:
        alive = ledger.present(beat_s) | {incarnation()}
        return targets.service_discovery(config.run.dir, config.run.id, socket.gethostname(), alive)

    try:
        with shown_metrics(config, "ledger", f"ledger-{index}" if index else "ledger", index, find_targets):
            collector.warm()
            recovered("ledger")
            yield
    finally:
        REGISTRY.unregister(collector)


def silence_s(config: Config) -> float:
    """How long a worker may be silent before it counts as gone."""
    return config.ledger.heartbeat_s * 3 + 5.0


def surroundings(config: Config, ledger: Ledger) -> Surroundings:
    """What the run's files and configuration say of it."""
    run_dir, on_gpu = Path(config.run.dir), config.learner.device == "cuda"

    def desired() -> Mapping[str, int]:
        ordered = read_orders(run_dir).get("workers")
        n_workers = ordered if isinstance(ordered, int) and 0 <= ordered <= WORKERS_MAX else sum(w.count for w in config.workers)
        return {"actor": n_workers, "learner": 1}

    name = config.environment.name or config.task.reward
    return Surroundings(
        env=name.rpartition("/")[2][:ENV_CHARS_MAX], learner_devices=config.learner.ranks if on_gpu else 1, desired=desired,
        restarts=lambda: read_restarts(run_dir), failures=lambda: failures.read(run_dir), beat_s=silence_s(config),
        renewed=ledger.renewals,
    )  # fmt: skip


def _show_devices(role: str) -> None:
    """The device's time, its GPUs and its engine, where the role has them."""
    pool = {"worker": "actor", "learner": "learner"}.get(role)
    if role == "worker":
        REGISTRY.register(Settling(WORKER_CLOCK))
        REGISTRY.register(EngineCollector())
    if pool is not None and (nvml := open_nvml()) is not None:
        REGISTRY.register(GpuCollector(pool, nvml))


def _version() -> str:
    try:
        return version("rollbook")
    except PackageNotFoundError:
        return "unknown"
