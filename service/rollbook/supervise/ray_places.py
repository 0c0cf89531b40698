"""Places that a run holds on a Ray cluster: one placement group a role, kept while the role is started again.

Owns the groups' names, which hold the run and the attempt of its supervisor, so that no attempt finds a name taken by another
one. A group is one bundle on one node: a learner with all its ranks, or a worker with its engine, has its whole place or none.
Ray moves a group whose node is lost, to any node that has room. Never starts anything, and never decides who gives its place up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass

import ray
from ray._common.utils import hex_to_binary
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollbook.supervise.backend import Needs
from rollbook.supervise.needs import amounts

PREFIX = "rollbook"
LOOK_S = 1.0
"""How long an answer about the groups is good."""
CREATED, REMOVED = "CREATED", "REMOVED"


@dataclass(frozen=True, slots=True)
class Place:
    """One placement group as Ray tells of it."""

    id: str
    attempt: str
    role: str
    serial: str
    state: str
    node_id: str
    """Node of its bundle; empty while it waits for one."""
    bundle: tuple[tuple[str, float], ...]

    @property
    def is_placed(self) -> bool:
        """Whether Ray has found a node for it."""
        return self.state == CREATED

    @property
    def needs(self) -> Needs:
        """What it reserves."""
        there = dict(self.bundle)
        return Needs(there.get("CPU", 0.0), there.get("GPU", 0.0))

    @property
    def group(self) -> PlacementGroup:
        """Ray's handle."""
        return PlacementGroup(ray.PlacementGroupID(hex_to_binary(self.id)), bundle_cache=[dict(self.bundle)])


def places_of(run_id: str) -> list[Place]:
    """Every group of a run, of any attempt, oldest first. Removed ones are left out."""
    out = []
    for group in placement_group_table().values():
        parts = str(group["name"]).rsplit("/", 3)
        if len(parts) != 4 or parts[0] != f"{PREFIX}/{run_id}" or group["state"] == REMOVED:
            continue
        (bundle,), (node_id,) = group["bundles"].values(), group["bundles_to_node_id"].values()
        node = node_id if group["state"] == CREATED else ""
        sizes = tuple(sorted((str(name), float(amount)) for name, amount in bundle.items()))
        out.append(Place(group["placement_group_id"], parts[1], parts[2], parts[3], group["state"], node, sizes))
    return sorted(out, key=lambda place: place.serial)


class Places:
    """The groups of one attempt.

    Args:
        is_detached: they outlive this process, so that its successor adopts them; else Ray removes them with it.
    """

    def __init__(self, run_id: str, attempt: str, is_detached: bool) -> None:
        self._run_id, self._attempt, self._is_detached = run_id, attempt, is_detached
        self._held: dict[str, PlacementGroup] = {}
        self._aimed: dict[str, str] = {}
        """Node that a role's group was meant for, until Ray tells where it is."""
        self._seen: tuple[float, dict[str, Place]] = (float("-inf"), {})

    def adopt(self, running: Collection[str]) -> tuple[list[str], list[str]]:
        """Take over this attempt's groups and those of roles that go on; every other group of the run is removed.

        Returns: the roles whose group was taken over, and those whose group was removed.
        """
        newest = {place.role: place for place in places_of(self._run_id)}
        removed = []
        for place in places_of(self._run_id):
            if newest[place.role].id == place.id and (place.attempt == self._attempt or place.role in running):
                self._held[place.role] = place.group
                continue
            removed.append(place.role)
            _remove(place.group)
        return sorted(self._held), sorted(removed)

    def hold(self, role: str, needs: Needs, target: str) -> PlacementGroupSchedulingStrategy:
        """The strategy that starts a role in its group, which is made where there is none of that size.

        Raises: RayError, ValueError.
        """
        held = self._held.get(role)
        places = {place.id: place for place in places_of(self._run_id)} if held is not None else {}
        place = places.get(held.id.hex()) if held is not None else None
        if place is None or not _is_of(place, needs):
            self.give_back(role)
            name = "/".join((PREFIX, self._run_id, self._attempt, role, f"{time.time_ns():020d}"))
            self._held[role] = placement_group(
                [amounts(needs)], "STRICT_PACK", name, "detached" if self._is_detached else None, target or None
            )
            self._aimed[role] = target
            self._forget()
        return PlacementGroupSchedulingStrategy(self._held[role], placement_group_bundle_index=0)

    def look(self, role: str) -> Place | None:
        """A role's group; None when there is none, or somebody has removed it."""
        at, seen = self._seen
        if time.monotonic() - at >= LOOK_S:
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                seen = {place.id: place for place in places_of(self._run_id)}
            self._seen = (time.monotonic(), seen)
        held = self._held.get(role)
        return seen.get(held.id.hex()) if held is not None else None

    def node_id(self, role: str) -> str:
        """Where a role's group is, or was meant to be; empty when nobody knows."""
        place = self.look(role)
        return (place.node_id if place is not None else "") or self._aimed.get(role, "")

    def give_back(self, role: str) -> None:
        """Remove a role's group, and with it whatever runs there."""
        self._aimed.pop(role, None)
        if (held := self._held.pop(role, None)) is not None:
            _remove(held)
            self._forget()

    def keep(self, roles: Collection[str]) -> None:
        """Give back the group of every other role."""
        for role in set(self._held) - set(roles):
            self.give_back(role)

    def _forget(self) -> None:
        self._seen = (float("-inf"), self._seen[1])


def _is_of(place: Place, needs: Needs) -> bool:
    there, wanted = dict(place.bundle), amounts(needs)
    return there.keys() == wanted.keys() and all(abs(there[name] - amount) < 1e-3 for name, amount in wanted.items())


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has gone with its creator, or the cluster has
        remove_placement_group(group)
