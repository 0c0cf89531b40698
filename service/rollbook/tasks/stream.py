"""The task stream: which task comes next, for ever the same, however often a feeder is restarted.

Owns the order. Item number d of a stream (d = 0, 1, ...) is task ``task_order(seed, epoch, size)[position]`` with
``epoch, position = divmod(d, size)``: a pure function, so nothing but ``d`` needs to survive. The state that goes into the
ledger's cursor is ``d``, the state of a torchdata StatefulDataLoader that delivers the tasks, and what both depend on.
Never decides how many tasks are drawn, and never goes on after the last epoch. Upholds R10 (the cursor row is the truth).
Opening a loader draws from torch's global generator, so a stream belongs into a process that trains and samples nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from rollbook.core.errors import TaskError
from rollbook.core.idempotency import digest
from rollbook.tasks.sources import TaskSource

log = logging.getLogger(__name__)

_FORMAT = 1


def task_order(seed: int, epoch: int, size: int) -> list[int]:
    """The order of one epoch: indices 0 .. size - 1 sorted by a keyed hash.

    A permutation for every (seed, epoch), uniform but for hash collisions, and independent of any library's generator.
    """
    key = hashlib.sha256(digest("task order", seed, epoch).encode())

    def rank(index: int) -> bytes:
        hasher = key.copy()
        hasher.update(index.to_bytes(8, "little"))
        return hasher.digest()

    return sorted(range(size), key=rank)


class Drawn(NamedTuple):
    """A task as drawn: its number in the stream, the epoch, its index in the source, and itself."""

    number: int
    epoch: int
    task_index: int
    task: dict


class _Sampler:
    """Endless indices over all epochs, from ``start`` on.

    Endless on purpose: a StatefulDataLoader never sees an epoch's end, which is where its state misleads. Its epoch is not
    in its state; a state taken at the end says "finished", and loading one either gives an empty epoch (meta-pytorch/data
    issue 1437) or, with a sampler of one's own, starts again at the first item.
    """

    def __init__(self, seed: int, size: int, start: int) -> None:
        self.seed = seed
        self.size = size
        self.start = start
        self.iterator: _Indices | None = None

    def __iter__(self) -> _Indices:
        self.iterator = _Indices(self)
        return self.iterator


class _Indices(Iterator[int]):
    """The iterator torchdata keeps: it recognises ``state_dict`` and ``load_state_dict`` and stores ``drawn``."""

    def __init__(self, sampler: _Sampler) -> None:
        self._sampler = sampler
        self._epoch = -1
        self._order: list[int] = []
        self.drawn = sampler.start

    def __next__(self) -> int:
        epoch, position = divmod(self.drawn, self._sampler.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, task_order(self._sampler.seed, epoch, self._sampler.size)
        self.drawn += 1
        return self._order[position]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class _Indexed:
    """A source as a map-style dataset whose items carry their index."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[int, dict]:
        return index, self._source[index]


def _as_it_is(item: Any) -> Any:
    return item


class TaskStream:
    """Tasks of a source in order, over epochs, restorable at every point.

    Args:
        source: the tasks; its digest is part of the state.
        seed: the run's seed.
        epochs: passes over the source; 0 = without end.
        state_json: a state from ``state_json()``, or ``"{}"`` for the beginning.

    Raises: TaskError (the state belongs to other tasks or another seed, or is no state).
    """

    def __init__(self, source: TaskSource, seed: int, epochs: int = 0, state_json: str = "{}") -> None:
        self._source = source
        self._identity = {"format": _FORMAT, "seed": seed, "size": len(source), "digest": source.digest()}
        self._seed = seed
        self._size = len(source)
        self._end = epochs * self._size if epochs else None
        state = _parse_state(state_json)
        if state:
            self._check_identity(state)
        self.drawn: int = state.get("drawn", 0)
        """Tasks drawn since the stream's beginning: the one number the order depends on."""
        self._open(state.get("loader"))

    @property
    def exhausted(self) -> bool:
        """True when every task of the last epoch has been drawn; never without a limit of epochs."""
        return self._end is not None and self.drawn >= self._end

    def take(self, n: int) -> list[Drawn]:
        """The next ``n`` tasks, fewer only when the last epoch ends."""
        if self._end is not None:
            n = max(0, min(n, self._end - self.drawn))
        out = []
        for _ in range(n):
            index, task = next(self._iterator)
            out.append(Drawn(self.drawn, self.drawn // self._size, index, task))
            self.drawn += 1
        return out

    def state_json(self) -> str:
        """The stream's state, as stored in the cursor: restoring it gives exactly the task after the last one taken."""
        state = self._identity | {"drawn": self.drawn, "loader": self._loader.state_dict()}
        return json.dumps(state, sort_keys=True)

    def _check_identity(self, state: dict) -> None:
        differing = [key for key, value in self._identity.items() if state.get(key) != value]
        if differing:
            raise TaskError(
                f"the task stream was begun with other tasks ({', '.join(differing)} differ): this run's order cannot be "
                f"continued with {len(self._source)} tasks from {self._source.name(0)} on; restore the source or start a new run"
            )

    def _open(self, loader_state: dict | None) -> None:
        # `drawn` is the truth and the loader's state only has to agree with it. It is a private format of torchdata: where
        # another version cannot load it or lands elsewhere, a loader opened at `drawn` delivers the same order. Counting is
        # ours for another reason too: enumerate() over a restored loader starts at 0 (meta-pytorch/data issue 1503).
        if loader_state is not None:
            try:
                self._start_loader(loader_state)
                if self._position() == self.drawn:
                    return
            except (AssertionError, KeyError, TypeError, AttributeError):
                pass
            log.warning("the stored loader state does not stand at task %d; opened a new loader there", self.drawn,
                        extra={"event": "loader_state_replaced"})  # fmt: skip
        self._start_loader(None)

    def _start_loader(self, state: dict | None) -> None:
        self._sampler = _Sampler(self._seed, self._size, self.drawn)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 on newer torch
            # No worker processes: nothing is prefetched, so the state never runs ahead of what was delivered.
            self._loader = StatefulDataLoader(
                _Indexed(self._source), batch_size=None, sampler=self._sampler, num_workers=0, collate_fn=_as_it_is
            )
        if state is not None:
            self._loader.load_state_dict(state)
        self._iterator = iter(self._loader)

    def _position(self) -> int | None:
        iterator = self._sampler.iterator
        return iterator.drawn if iterator is not None else None


def _parse_state(state_json: str) -> dict:
    try:
        state = json.loads(state_json)
        if state == {} or (isinstance(state["drawn"], int) and state["drawn"] >= 0):
            return state
    except (ValueError, KeyError, TypeError):
        pass
    raise TaskError(f"the cursor's state {state_json[:80]!r} is not a task stream's state")
