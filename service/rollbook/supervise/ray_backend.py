"""Roles on a Ray cluster: each an ordinary role process under a ``RoleHost`` actor that reserves what it needs on its node.

Owns names, placement, loss and hand-over of the hosts; the places that roles with needs run in are ``ray_places``. Never lets
Ray restart anything, and keeps nothing in it: a host is found again by its name, everything else is in the ledger and the run
directory. Every call has a bound.

A role is dead when its host says so. A host that died on a node that lives took its role with it; what is left there is ended
before the successor starts. A node that is dead or cut off answers nobody: the successor starts elsewhere, names no predecessor
as superseded, and the predecessor's term decides when it may begin (R12).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.supervise.backend import LEDGER, WORKER, Needs, Node, Order, Placement, Running
from rollbook.supervise.needs import Free, amounts, fits, in_words, role_needs, shortage, shortfall_lines
from rollbook.supervise.policy import EXIT_STOPPED
from rollbook.supervise.process import EXIT_UNKNOWN, ProcessRecord
from rollbook.supervise.ray_host import RoleHost, end_left
from rollbook.supervise.ray_places import Places, places_of

CONNECT_S = 10.0
"""How long a cluster's address may take to accept a connection."""
POLL_S = 0.25
"""How often a host is asked."""
ANSWER_S = 5.0
"""How long a host may take for what is more than a look."""
KILL_S = 15.0
"""How long a host may take to kill its role before it is killed itself."""
NODES_S = 1.0
"""How long an answer about the nodes is good."""
CARRIED = (
    "PYTHONPATH", "HF_HUB_OFFLINE", "ROLLBOOK_FAILPOINTS", "ROLLBOOK_FAILPOINTS_ONCE_DIR", "ROLLBOOK_LOG",
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG", "OTEL_SDK_DISABLED",
)  # fmt: skip
"""Environment variables that roles get from where the run was started. No secret is among them: a node has its own."""


def carried_environment() -> dict[str, str]:
    """What roles on other nodes get of this process's environment, beside what their own nodes give them."""
    return {name: os.environ[name] for name in CARRIED if os.environ.get(name)}


def namespace_of(run_id: str) -> str:
    """Ray namespace of a run: its hosts and its supervisor are found in it by name."""
    return f"rollbook.{run_id}"


def connect(address: str, run_id: str) -> None:
    """Become a client of a cluster that runs already. Raises Unavailable naming the address."""
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdecimal():  # Ray itself would ask a dead address for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(
            address=address, namespace=namespace_of(run_id), log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=False,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise Unavailable(f"no Ray cluster answers at {address!r}: {_brief(error)}; start one with `ray start --head`") from error


class RayTarget:
    """A role's process as the watchdog signals it, through its host."""

    is_here = False

    def __init__(self, name: str, incarnation: str, actor: Any) -> None:
        self.name, self.incarnation, self.pid, self._actor = name, incarnation, 0, actor

    def signal(self, number: int) -> bool:
        """See ``backend.Target``."""
        return bool(_within(ANSWER_S, lambda: self._actor.send.remote(number)))

    def catches(self, number: int) -> bool:
        """See ``backend.Target``."""
        return bool(self.pid and _within(ANSWER_S, lambda: self._actor.catches.remote(number)))


class RayRole:
    """A started role; its host is asked without waiting for the answer."""

    def __init__(
        self, name: str, incarnation: str, actor: Any, unreachable_s: float, is_alive: Callable[[str], bool],
        lacks: Callable[[], str],
    ) -> None:  # fmt: skip
        self.name, self.incarnation, self._lacks = name, incarnation, lacks
        self._target, self._actor = RayTarget(name, incarnation, actor), actor
        self._unreachable_s, self._is_alive = unreachable_s, is_alive
        self._started_at = time.monotonic()
        self._unanswered_since = 0.0
        """When it was asked first without an answer since; 0 when there is no such question."""
        self._call: Any = None
        self._next_at = 0.0
        self._killed_at = 0.0
        self._placement: Placement | None = None
        self._code: int | None = None
        self._cause = ""
        self.is_known_dead = False
        """Its host has seen the end of its whole tree."""

    @property
    def record(self) -> RayTarget:
        """For signals."""
        return self._target

    def cause(self) -> str:
        """How it was lost."""
        return self._cause

    def placement(self) -> Placement | None:
        """See ``backend.Running``."""
        return self._placement

    def waiting_s(self) -> float:
        """See ``backend.Running``."""
        waits = self._placement is None and self._code is None
        return time.monotonic() - self._started_at if waits else 0.0

    def node_id(self) -> str:
        """Ray's id of its node."""
        return self._placement.node_id if self._placement else ""

    def waits_for(self) -> str:
        """See ``backend.Running``."""
        return self._lacks() if self.waiting_s() > 0 else ""

    def left(self) -> ProcessRecord | None:
        """What may be left of it on its node."""
        p = self._placement
        return ProcessRecord(self.name, p.pid, p.start_time, self.incarnation) if p else None

    def exit_code(self) -> int | None:
        """See ``backend.Running``; the code of a lost role is ``EXIT_UNKNOWN``."""
        if self._code is None:
            self._look()
        return self._code

    def terminate(self) -> None:
        """SIGTERM; a role that waits for a place is given up."""
        if self._code is None and self._placement is None:
            self._give_up(EXIT_STOPPED)
        elif self._code is None:
            self._actor.terminate.remote()

    def kill(self) -> None:
        """SIGKILL through the host, which is killed itself when that takes too long."""
        if self._code is None and self._placement is None:
            self._give_up(EXIT_STOPPED)
        elif self._code is None and not self._killed_at:
            self._killed_at = time.monotonic()
            self._actor.kill.remote()

    def _look(self) -> None:
        now = time.monotonic()
        if self._call is None:
            if now < self._next_at:
                return
            self._call = self._actor.ask.remote()
            self._unanswered_since = self._unanswered_since or now
        if not ray.wait([self._call], timeout=0)[0]:
            self._bear(now, "")
            return
        call, self._call, self._next_at = self._call, None, now + POLL_S
        try:
            code, placement = ray.get(call, timeout=ANSWER_S)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            self._bear(now, _brief(error))
        except ray.exceptions.RayError as error:
            self._lose(_brief(error))
        else:
            self._unanswered_since, self._placement, self._target.pid = 0.0, placement, placement.pid
            if code is not None:
                self.is_known_dead = True
                self._give_up(code)

    def _bear(self, now: float, why: str) -> None:
        """No answer: nothing is concluded from it before its time."""
        if self._killed_at and now - self._killed_at > KILL_S:
            self._lose("its host did not kill it in time")
        elif self._placement is not None and now - self._unanswered_since > self._unreachable_s:
            self._lose(why or f"its host has answered nothing for {self._unreachable_s:.0f} s")

    def _lose(self, why: str) -> None:
        if self._placement is None:
            self._cause = f"its host did not start: {why}"
        elif self._is_alive(self._placement.node_id):
            self._cause = f"its host on node {self._placement.node} is lost: {why}"
        else:
            self._cause = f"node lost: {self._placement.node}: {why}"
        self._give_up(EXIT_UNKNOWN)

    def _give_up(self, code: int) -> None:
        """The role has ended or is taken for ended: its host goes, and with it what it reserves."""
        self._code = code
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor, no_restart=True)


class RayBackend:
    """Starts roles on the nodes of the cluster this process is a client of (``connect``).

    Args:
        env: environment variables that every role gets.
        attempt: names the places that are held; what the supervisor and those that replace it have in common.
        is_detached: hosts outlive this process, so that its successor takes them over; else they end with it.
    """

    def __init__(self, config: Config, env: Mapping[str, str], attempt: str = "", is_detached: bool = False) -> None:
        self._config, self._env = config.cluster, dict(env)
        self._places = Places(config.run.id, attempt or uuid.uuid4().hex, is_detached)
        self._namespace = namespace_of(config.run.id)
        self._is_detached = is_detached
        self._roles: dict[str, RayRole] = {}
        self._aimed: dict[str, str] = {}
        """Node that a role without needs was last meant for."""
        self._silent: set[str] = set()
        """Nodes that were asked to end what is left there and did not answer: they are not waited for again."""
        self._nodes: tuple[float, list[Node]] = (float("-inf"), [])
        self._host = ray.remote(RoleHost)
        self._end_left = ray.remote(end_left)

    def open(self, emit: Callable[[str], None]) -> Mapping[str, Running]:
        """Take over the newest host of every role with its place, if hosts are to outlive their supervisor; end the others."""
        found = sorted(name for name in ray.util.list_named_actors() if name.count("@") == 2)
        newest = {name.split("@")[0]: name for name in sorted(found, key=lambda name: name.split("@")[1])}
        for name in found:
            role, _, incarnation = name.split("@")
            try:
                actor = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                continue  # it died meanwhile
            if self._is_detached and newest[role] == name:
                self._roles[role] = self._role(role, incarnation, actor)
                emit(f"{role} goes on under this supervisor")
                continue
            emit(f"ending {role} left by an earlier supervisor")
            _within(KILL_S, actor.kill.remote)
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)
        held, removed = self._places.adopt(self._roles)
        emit(f"places held on: {', '.join(held)}") if held else None
        emit(f"places of an earlier attempt removed: {', '.join(removed)}") if removed else None
        return dict(self._roles)

    def start(self, order: Order) -> Running:
        """See ``backend.Backend``; it may wait for a place."""
        previous = self._roles.get(order.name)
        supersedes = self._settle(previous)
        incarnation = uuid.uuid4().hex
        whole = Order(order.name, order.kind, order.argv, self._env | dict(order.env), order.log, order.needs)
        try:
            options: dict[str, Any] = {
                "name": f"{order.name}@{time.time_ns():020d}@{incarnation}", "namespace": self._namespace,
                "num_cpus": order.needs.cpus, "num_gpus": order.needs.gpus, "max_restarts": 0, "max_task_retries": 0,
                "lifetime": "detached" if self._is_detached else None, "scheduling_strategy": self._strategy(order, previous),
            }  # fmt: skip
            actor = self._host.options(**options).remote(whole, incarnation, supersedes, self._config.orphan_s)
        except (ray.exceptions.RayError, ValueError) as error:
            raise OSError(_brief(error)) from error
        self._roles[order.name] = role = self._role(order.name, incarnation, actor)
        return role

    def nodes(self) -> list[Node]:
        """See ``backend.Backend``; the newest answer where the cluster gives none."""
        at, nodes = self._nodes
        if time.monotonic() - at < NODES_S:
            return nodes
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            leaving = set(_cluster_state().get_draining_nodes())
            nodes = [
                Node(f"{n['NodeManagerAddress']} ({n['NodeID'][:8]})", n["NodeID"], n["NodeID"] in leaving, n["Resources"])
                for n in ray.nodes()
                if n["Alive"]
            ]
        self._nodes = (time.monotonic(), nodes)
        return nodes

    def room(self, needs: Needs) -> int:
        """See ``backend.Backend``; 0 for a role that needs nothing, since nothing bounds it."""
        wanted, free = amounts(needs), self.free()
        usable = [free.get(node.id, {}) for node in self.nodes() if not node.is_leaving]
        return sum(
            min(int(left.get(name, 0.0) / amount + 1e-6) for name, amount in wanted.items()) for left in usable if wanted
        )

    def free(self) -> Free:
        """What nobody has reserved, by node; nothing where the cluster gives no answer."""
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            return _cluster_state().available_resources_per_node()
        return {}

    def shortfall(self, config: Config) -> list[str]:
        """In lines for a person: which roles of a run that has not begun find no place; what the run itself still holds counts as
        free."""
        free = {node: dict(left) for node, left in self.free().items()}
        for place in places_of(config.run.id):
            for name, amount in place.bundle if place.node_id in free else ():
                free[place.node_id][name] = free[place.node_id].get(name, 0.0) + amount
        return shortfall_lines(role_needs(config), self.nodes(), free)

    def release(self, name: str) -> None:
        """See ``backend.Backend``."""
        self._places.give_back(name)

    def keep(self, names: Collection[str]) -> None:
        """See ``backend.Backend``."""
        self._places.keep(names)

    def close(self) -> None:
        """Every host has gone with its role; the places go now."""
        self._places.keep(())

    def check(self, config: Config) -> None:
        """Refuse what cannot work on these nodes. Raises ConfigError."""
        addresses = {node.name.split()[0] for node in self.nodes()}
        listens_here = config.ledger.address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
        if listens_here and len(addresses) > 1 and not all(address.startswith("127.") for address in addresses):
            raise ConfigError(
                f"ledger.address = {config.ledger.address!r}: roles on the nodes {', '.join(sorted(addresses))} cannot reach a "
                "ledger server that listens on loopback; with 0.0.0.0:0 it tells them the address of its node"
            )

    def _role(self, name: str, incarnation: str, actor: Any) -> RayRole:
        return RayRole(name, incarnation, actor, self._config.unreachable_s, self._is_alive, lambda: self._lacks(name))

    def _lacks(self, name: str) -> str:
        place = self._places.look(name)
        if place is None or place.is_placed:
            return ""
        why = shortage(place.needs, self.nodes(), self.free())
        return f"waits for {in_words(place.needs)}" + (f": {why}" if why else "")

    def _is_alive(self, node_id: str) -> bool:
        self._nodes = (float("-inf"), self._nodes[1])  # it may have died since the last look
        return any(node.id == node_id for node in self.nodes())

    def _settle(self, previous: RayRole | None) -> str:
        """The predecessor's incarnation once nothing of it lives; empty where that cannot be known."""
        if previous is None:
            return ""
        left = previous.left()
        node = previous.node_id()
        if not previous.is_known_dead and left is not None and node not in self._silent and self._is_alive(node):
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = self._end_left.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            # Meanwhile nobody asks the other hosts, which must not take themselves for orphans.
            previous.is_known_dead = bool(_within(min(KILL_S, self._config.orphan_s / 3), lambda: task.remote(left)))
            self._silent |= set() if previous.is_known_dead else {node}
        return previous.incarnation if previous.is_known_dead else ""

    def _strategy(self, order: Order, previous: RayRole | None) -> Any:
        """Where a role goes: into the place that is held for it, unless it cannot stay there, or into a new one."""
        shunned = previous.node_id() if previous is not None and not previous.is_known_dead else ""
        nodes = [node for node in self.nodes() if not node.is_leaving and node.id != shunned]
        target = self._target(order, nodes)
        if not amounts(order.needs):
            self._aimed[order.name] = target
            return NodeAffinitySchedulingStrategy(target, soft=True) if target else "DEFAULT"
        at = self._places.node_id(order.name)
        stands_alone = order.kind != LEDGER or not target or at not in self._nodes_of(LEDGER, order.name)
        if at and self._is_alive(at) and not (at in {node.id for node in nodes} and stands_alone):
            self._places.give_back(order.name)
        return self._places.hold(order.name, order.needs, target)

    def _target(self, order: Order, nodes: Sequence[Node]) -> str:
        """The node that is preferred for a new place; empty where Ray's choice is as good.

        Workers are spread, and ledger servers each have a node of their own, so that a node takes at most one with it.
        """
        free = self.free()
        roomy = [node for node in nodes if fits(order.needs, free.get(node.id, {}))]
        if order.kind not in (LEDGER, WORKER):
            return roomy[0].id if roomy and len(nodes) < len(self.nodes()) else ""
        taken = Counter(self._nodes_of(order.kind, order.name))
        if order.kind == LEDGER:
            roomy = [node for node in roomy if not taken[node.id]] if taken else roomy
        if not roomy:
            return ""
        idle_gpus = {node.id: bool(node.total.get("GPU") and not order.needs.gpus) for node in roomy}
        return min(roomy, key=lambda n: (taken[n.id], idle_gpus[n.id], -free.get(n.id, {}).get("CPU", 0.0))).id

    def _nodes_of(self, kind: str, but: str) -> list[str]:
        """Nodes of the live roles of a kind, one entry a role."""
        live = [r for name, r in self._roles.items() if name.startswith(kind) and name != but and r.exit_code() is None]
        return [node for r in live if (node := r.node_id() or self._places.node_id(r.name) or self._aimed.get(r.name, ""))]


def _within(bound_s: float, call: Callable[[], Any]) -> Any:
    """The call's answer; None when there is none within the bound."""
    try:
        return ray.get(call(), timeout=bound_s)
    except ray.exceptions.RayError:
        return None


def _cluster_state() -> Any:
    """What Ray itself asks for nodes that are drained and for what is free on each; no public call answers either."""
    try:
        from ray._private.state import state
    except ImportError as error:
        raise ConfigError(f"this release of Ray ({ray.__version__}) is not known; use 2.60") from error
    return state


def _brief(error: BaseException) -> str:
    """An error of Ray in one line: its messages are paragraphs with stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(("\t", " "))]
    return " ".join(dict.fromkeys(lines))[:400] or type(error).__name__
