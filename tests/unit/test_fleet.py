"""How many workers there are while nodes come and go, over a cluster whose nodes and places the test sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollbook.core.config import Config, load_config, with_worker
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.supervise import control, fleet
from rollbook.supervise.backend import LEARNER, LEDGER, WORKER, Needs, Node, Order, Placement, Running
from rollbook.supervise.children import Child
from rollbook.supervise.control import CONFIGURED, FILL
from rollbook.supervise.fleet import Fleet
from rollbook.supervise.policy import RestartPolicy
from run_support import CONFIG


@dataclass
class Process:
    """A started role that does what the test says."""

    record: object = None
    code: int | None = None
    waits_s: float = 0.0
    lacks: str = ""
    node: str = "a"
    asked: list[str] = field(default_factory=list)

    def exit_code(self) -> int | None:
        return self.code

    def cause(self) -> str:
        return ""

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")

    def placement(self) -> Placement | None:
        return None

    def waiting_s(self) -> float:
        return self.waits_s

    def node_id(self) -> str:
        return self.node

    def waits_for(self) -> str:
        return self.lacks if self.waits_s else ""


@dataclass
class Places:
    """A backend that starts nothing: nodes, and room on them."""

    free: int = 0
    kept: set[str] = field(default_factory=set)
    alive: list[Node] = field(default_factory=lambda: [Node("a", "a")])

    def open(self, emit: Callable[[str], None]) -> Mapping[str, Running]:
        return {}

    def start(self, order: Order) -> Running:
        raise OSError("nothing is started here")

    def nodes(self) -> list[Node]:
        return self.alive

    def room(self, needs: Needs) -> int:
        return self.free

    def release(self, name: str) -> None:
        self.kept.discard(name)

    def keep(self, names: Collection[str]) -> None:
        self.kept = set(names)

    def close(self) -> None: ...


class World:
    """The fleet of a configuration with two workers and a learner."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        monkeypatch.setattr(fleet, "LOOK_S", 0.0)
        (tmp_path / "run.toml").write_text(CONFIG)
        self.config: Config = load_config(tmp_path / "run.toml", ["workers.0.count=2", *overrides])
        self.places, self.said = Places(), list[str]()
        self.fleet = Fleet(self.config, self.places, self.said.append)
        self.ledger, self.learner = self.child("ledger", LEDGER), self.child("learner", LEARNER)
        self.children = [self.learner, self.worker(0), self.worker(1)]
        for child in self.children:
            self.run(child)

    def child(self, name: str, kind: str) -> Child:
        return Child(name, kind, [], RestartPolicy(self.config.supervisor), Path("log"), {}, Needs(1.0))

    def worker(self, index: int) -> Child:
        return self.child(f"worker-{index}", WORKER)

    def run(self, child: Child, waits_s: float = 0.0) -> Process:
        """As if the supervisor had started it."""
        process = Process(waits_s=waits_s, lacks="waits for 1 CPU")
        child.process, child.is_placed = process, waits_s == 0.0
        return process

    def end(self, child: Child) -> bool:
        """As if the supervisor had seen its end; whether it was asked for."""
        child.process = None
        return child.goes()

    def look(self, wanted: int | str) -> list[str]:
        self.fleet.tend([self.ledger], self.children, self.worker, wanted)
        return [c.name for c in self.children if c.kind == WORKER and not c.retired]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_an_ordered_number_is_reached_from_both_sides_and_an_index_is_used_again(world: World) -> None:
    assert world.look(CONFIGURED) == ["worker-0", "worker-1"]
    assert world.look(4) == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert world.look(1) == ["worker-0"]
    retired = [c for c in world.children if c.retired]
    assert [c.name for c in retired if c.finished] == ["worker-2", "worker-3"], "never started, they are finished at once"
    one = world.children[2]
    assert one.process is not None and one.process.asked == ["terminate"] and not one.finished  # type: ignore[attr-defined]
    assert world.end(one) and one.finished and one.restart_at is None
    assert world.look(2) == ["worker-0", "worker-1"]
    assert not one.finished and one.restart_at == 0.0


def test_places_are_held_for_wanted_roles_alone(world: World) -> None:
    world.look(1)
    assert world.places.kept == {"ledger", "learner", "worker-0", "worker-1"}, "one that is asked to go has not gone"
    world.end(world.children[2])
    world.look(1)
    assert world.places.kept == {"ledger", "learner", "worker-0"}


def waiting(world: World, child: Child, waits_s: float) -> dict[str, str]:
    """What is shown when that role has waited so long for a GPU; raises what the run would end with."""
    world.run(child, waits_s).lacks = "waits for 1 GPU"
    return world.fleet.waiting([world.ledger, *world.children])


def test_what_a_role_waits_for_is_shown_and_ends_no_run_without_a_bound(world: World) -> None:
    shown = waiting(world, world.learner, 1e6)
    assert shown == {"learner": "waits for 1 GPU"}
    assert control.waiting_lines({"outcome": control.RUNNING, "waiting": shown}) == ["learner waits for 1 GPU"]
    assert control.waiting_lines({"outcome": control.STOPPED, "waiting": shown}) == control.waiting_lines({}) == []


@pytest.mark.parametrize(("role", "ends"), [("learner", True), ("worker-0", False), ("ledger-1", False)])
def test_a_run_that_cannot_advance_ends_after_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, ends: bool
) -> None:
    world = World(tmp_path, monkeypatch, "cluster.wait_for_resources_s=10", "ledger.standbys=1")
    world.children.append(world.child("ledger-1", LEDGER))
    child = next(c for c in world.children if c.name == role)
    assert waiting(world, child, 10.0) == {role: "waits for 1 GPU"}
    if not ends:
        assert waiting(world, child, 10.1) == {role: "waits for 1 GPU"}, "others go on"
        return
    with pytest.raises(Unavailable, match=rf"{role} waits for 1 GPU; add nodes"):
        waiting(world, child, 10.1)


def test_a_run_whose_every_worker_waits_cannot_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, "cluster.wait_for_resources_s=10")
    waiting(world, world.children[1], 11.0)
    with pytest.raises(Unavailable, match="worker-0 waits for 1 GPU; worker-1 waits"):
        waiting(world, world.children[2], 11.0)


def test_nothing_is_scaled_once_there_is_nothing_left_to_generate(world: World) -> None:
    world.children[1].finished = True
    assert world.look(4) == ["worker-0", "worker-1"]


def test_a_filled_cluster_takes_workers_as_room_comes_and_gives_up_those_that_find_none(world: World) -> None:
    world.places.free = 2
    assert world.look(FILL) == ["worker-0", "worker-1", "worker-2", "worker-3"]
    for child in world.children[3:]:
        world.run(child)
    world.places.free = 0
    assert len(world.look(FILL)) == 4
    world.run(world.children[2], waits_s=world.config.cluster.place_s - 1)
    assert len(world.look(FILL)) == 4, "it may yet find a place"
    world.run(world.children[2], waits_s=world.config.cluster.place_s)
    assert world.look(FILL) == ["worker-0", "worker-2", "worker-3"]


def test_no_room_is_counted_while_a_worker_is_on_its_way(world: World) -> None:
    world.places.free = 1
    world.run(world.children[2], waits_s=1.0)
    assert len(world.look(FILL)) == 2


def test_what_runs_on_a_leaving_node_is_moved_and_that_is_no_death(world: World) -> None:
    world.places.alive = [Node("a", "a"), Node("b", "b", is_leaving=True)]
    process = world.run(world.learner)
    process.node = "b"
    world.look(CONFIGURED)
    world.look(CONFIGURED)
    assert process.asked == ["terminate"] and "learner leaves node b, which is drained" in world.said
    assert world.end(world.learner) and not world.learner.finished and world.learner.restart_at is not None
    assert not world.learner.goes(), "its next end is its own"


def test_a_role_without_which_nothing_advances_gets_the_place_of_one_worker(world: World) -> None:
    world.run(world.learner, waits_s=world.config.cluster.place_s - 1)
    world.look(CONFIGURED)
    assert not world.children[2].leaving
    world.run(world.learner, waits_s=world.config.cluster.place_s)
    world.look(CONFIGURED)
    world.look(CONFIGURED)
    assert [c.name for c in world.children if c.leaving] == ["worker-1"]
    assert "worker-1 gives its place to learner, without which nothing advances" in world.said


def test_a_worker_that_waits_is_told_of_once_and_takes_nobodys_place(world: World) -> None:
    world.run(world.children[1], waits_s=100.0)
    world.look(CONFIGURED)
    world.look(CONFIGURED)
    assert world.said == ["worker-0 waits for 1 CPU"]
    assert not any(c.leaving for c in world.children)


def test_a_role_that_is_slow_to_start_in_its_place_costs_no_worker_its_own(world: World) -> None:
    world.run(world.learner, waits_s=1000.0).lacks = ""
    world.run(world.children[1], waits_s=1000.0).lacks = ""
    assert world.look(FILL) == ["worker-0", "worker-1"]
    assert world.said[-2:] == ["learner is slow to start where it was placed", "worker-0 is slow to start where it was placed"]
    assert not any(c.leaving for c in world.children)


def test_a_role_that_does_not_go_is_killed_after_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, "supervisor.drain_s=1e-9")
    process = world.run(world.children[2])
    world.look(1)
    assert process.asked == ["terminate", "kill"] or (world.look(1) and process.asked[:2] == ["terminate", "kill"])


def test_a_worker_beyond_the_configuration_is_of_its_last_kind(world: World) -> None:
    assert with_worker(world.config, 1) == world.config
    assert sum(kind.count for kind in with_worker(world.config, 4).workers) == 5


def test_orders_are_checked_and_the_last_one_holds(tmp_path: Path) -> None:
    for wrong in (-1, control.WORKERS_MAX + 1, "many"):
        with pytest.raises(ConfigError, match="workers = "):
            control.order_workers(tmp_path, wrong)
    for right in (0, control.WORKERS_MAX, FILL, CONFIGURED):
        control.order_workers(tmp_path, right)
        assert control.read_orders(tmp_path) == {"workers": right}
    (tmp_path / "supervisor" / "orders.json").write_text("[")
    assert control.read_orders(tmp_path) == {}, "what cannot be read orders nothing"


def test_a_supervisor_obeys_an_order_to_stop_that_names_it_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BEAT_S", 0.0)
    (tmp_path / "supervisor").mkdir()
    control.order_stop(tmp_path, "an earlier one")
    mine = control.Control(tmp_path, "tiny", attempt="first")
    try:
        assert not mine.is_told_to_stop() and mine.wanted_workers() == CONFIGURED
        assert control.read_state(tmp_path)["outcome"] == control.RUNNING
        control.order_workers(tmp_path, 3)
        control.order_stop(tmp_path, mine.id)
        assert mine.is_told_to_stop() and mine.wanted_workers() == 3
    finally:
        mine.close(False, ConfigError("no"), {"learner": 2})
    state = control.read_state(tmp_path)
    assert (state["outcome"], state["error"], state["message"]) == ("failed", "ConfigError", "no")
    assert state["deaths"] == {"learner": 2}
    control.Control(tmp_path, "tiny").close(True, None, {})
    assert control.read_state(tmp_path)["outcome"] == control.COMPLETE
