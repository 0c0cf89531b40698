"""Step metrics in TensorBoard and, offline, in Weights & Biases, for people who look there already.

Owns the folder ``mirror/`` of the run directory. The ledger stays the truth: a mirror is made anew from it whenever it is opened
and whenever the lineage changes, so a step is there once however often the run was resumed or replayed. Never holds up the run:
a thread polls, and a mirror that fails is said once and given up.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, RollbookError
from rollbook.core.ports import LedgerPort
from rollbook.rpc.client import LedgerClient

POLL_S = 5.0
JOIN_S = 30.0
NEEDS = {"tensorboard": "tensorboard.summary.writer.event_file_writer", "wandb": "wandb"}
"""Mirror -> the module it needs."""


class Writer(Protocol):
    """One mirror of one run, empty when made."""

    def write(self, step: int, at_s: float, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under ``mirror/tensorboard``; wall times are those at which steps were finished."""

    def __init__(self, folder: Path, config: Config) -> None:
        event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._event, self._summary = event.Event, summary.Summary
        self._file = importlib.import_module(NEEDS["tensorboard"]).EventFileWriter(str(folder))

    def write(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=f"rollbook/{name}", simple_value=value) for name, value in values.items()]
        self._file.add_event(self._event(wall_time=at_s, step=step, summary=self._summary(value=scalars)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Wandb:
    """An offline run under ``mirror/wandb`` with the run's own id, so that syncing it again updates the same one."""

    def __init__(self, folder: Path, config: Config) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project="rollbook", id=config.run.id, name=config.run.id, dir=str(folder), mode="offline",
            config={"config_digest": config.digest()},
        )  # fmt: skip

    def write(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        self._run.log({f"rollbook/{name}": value for name, value in values.items()} | {"finished_at_s": at_s}, step=step)

    def flush(self) -> None:
        """Nothing: its own process writes."""

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[str, Callable[[Path, Config], Writer]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_mirrors(names: Sequence[str]) -> None:
    """Refuse at the start what could not be written later. Raises ConfigError naming the package."""
    for name in names:
        try:
            importlib.import_module(NEEDS[name])
        except ImportError:
            raise ConfigError(
                f"run.mirror names {name!r} and its package is not installed; pip install 'rollbook[mirror]', or leave it out"
            ) from None


class Mirror:
    """Writes what a ledger has and the mirror has not."""

    def __init__(self, config: Config, name: str) -> None:
        self._config, self._name = config, name
        self._folder = Path(config.run.dir) / "mirror" / name
        self._writer: Writer | None = None
        self._at: tuple[int, int] = (-1, 0)
        """Lineage and last step written."""

    def update(self, ledger: LedgerPort) -> int:
        """Write the steps finished since the last call; all of them on the first and after a fork. Returns how many."""
        lineage = ledger.resume_point().lineage
        if self._writer is None or lineage != self._at[0]:
            self._begin(lineage)
        assert self._writer is not None
        rows = ledger.step_metrics(lineage, self._at[1] + 1)
        for row in rows:
            self._writer.write(row["step"], row["finished_at_s"], scalars(row))
            self._at = (lineage, row["step"])
        if rows:
            self._writer.flush()
        return len(rows)

    def _begin(self, lineage: int) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._writer, self._at = WRITERS[self._name](self._folder, self._config), (lineage, 0)

    def close(self) -> None:
        """End what is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn: finite numbers, without the step and its time."""
    numbers = {n: v for n, v in row.items() if isinstance(v, (int, float)) and n not in ("step", "finished_at_s")}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


@contextlib.contextmanager
def mirrored(config: Config, make_client: Callable[[], LedgerClient], say: Callable[[str], None]) -> Iterator[None]:
    """Keep every mirror of the configuration up to date for the length of the block; ``rebuild`` adds what a server that ended
    before could not be asked for."""
    if not config.run.mirror:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(config, make_client, say, stop), name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


def _follow(config: Config, make_client: Callable[[], LedgerClient], say: Callable[[str], None], stop: threading.Event) -> None:
    mirrors = {name: Mirror(config, name) for name in config.run.mirror}
    with make_client() as client:
        while mirrors:
            ending = stop.wait(POLL_S)
            for name, mirror in list(mirrors.items()):
                try:
                    with contextlib.suppress(RollbookError):  # the ledger is starting, restarting or gone; asked again
                        mirror.update(client)
                    if ending:
                        mirror.close()
                except Exception as error:  # noqa: BLE001 - boundary: other people's code must not end the run's display
                    say(f"mirror {name} is given up: {error!r}")
                    del mirrors[name]
            if ending:
                return


def rebuild(config: Config, ledger: LedgerPort, names: Sequence[str]) -> dict[str, int]:
    """Make mirrors anew, whole; returns the steps in each."""
    made = {}
    for name in names:
        mirror = Mirror(config, name)
        try:
            made[name] = mirror.update(ledger)
        finally:
            mirror.close()
    return made
