"""What each role reserves on a cluster, and what to say where it cannot be had.

Owns the one place that turns a configuration into numbers of CPUs and GPUs, and the words for a shortage. Pure: nothing here asks
a cluster or places anything. Amounts are Ray's: logical CPUs, GPUs or the share of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollbook.core.config import Config, WorkerConfig
from rollbook.supervise.backend import Needs, Node

Free = Mapping[str, Mapping[str, float]]
"""What is left on each node, by node id."""
_SLACK = 1e-6
"""Shares of GPUs do not add up exactly."""


def server_needs(config: Config) -> Needs:
    """Of a ledger server, and of the feeder."""
    return Needs(config.cluster.server_cpus)


def learner_needs(config: Config) -> Needs:
    """Of the learner with all its ranks, which share one node: a gang has its whole place or none."""
    ranks = config.learner.ranks
    gpus = config.cluster.learner_gpus if ranks == 1 else float(ranks)  # of several ranks each has a whole one
    cpus = ranks * (config.cluster.learner_cpus or config.learner.threads)
    return Needs(cpus, gpus if config.learner.device == "cuda" else 0.0)


def worker_needs(config: Config, kind: WorkerConfig) -> Needs:
    """Of one worker with its engine, on one node."""
    return Needs(config.cluster.worker_cpus or kind.threads, config.cluster.worker_gpus if kind.device == "cuda" else 0.0)


def role_needs(config: Config) -> list[tuple[str, Needs]]:
    """Every configured role by name, those first without which nothing advances."""
    servers = ["ledger", *(f"ledger-{i}" for i in range(1, config.ledger.standbys + 1)), "feeder"]
    workers = [kind for kind in config.workers for _ in range(kind.count)]
    named = [(name, server_needs(config)) for name in servers] + [("learner", learner_needs(config))]
    return named + [(f"worker-{i}", worker_needs(config, kind)) for i, kind in enumerate(workers)]


def amounts(needs: Needs) -> dict[str, float]:
    """What is reserved, by Ray's name; empty for a role that needs nothing."""
    return {name: amount for name, amount in (("GPU", needs.gpus), ("CPU", needs.cpus)) if amount > 0}


def in_words(needs: Needs) -> str:
    """``2 GPUs and 4 CPUs``."""
    return " and ".join(f"{n:g} {name}{'' if n <= 1 else 's'}" for name, n in amounts(needs).items()) or "nothing"


def fits(needs: Needs, left: Mapping[str, float]) -> bool:
    """Whether that much is left."""
    return all(left.get(name, 0.0) + _SLACK >= amount for name, amount in amounts(needs).items())


def shortage(needs: Needs, nodes: Sequence[Node], free: Free) -> str:
    """Why no node takes such a role now; empty when one could."""
    usable = [node for node in nodes if not node.is_leaving]
    if any(fits(needs, free.get(node.id, {})) for node in usable):
        return ""
    if not usable:
        return "no node of the cluster takes roles"
    able = [node for node in usable if fits(needs, node.total)]
    if not able:
        return f"no node has that many, the largest has {_most(needs, usable, {node.id: node.total for node in usable})}"
    return f"on every node that has them they are taken, the most that is free is {_most(needs, able, free)}"


def without_place(wanted: Iterable[tuple[str, Needs]], nodes: Sequence[Node], free: Free) -> list[tuple[str, Needs, str]]:
    """Roles that find no place beside the others, each with the reason: workers come last, larger roles first."""
    left = {node.id: dict(free.get(node.id, {})) for node in nodes if not node.is_leaving}
    out = []
    for name, needs in sorted(wanted, key=lambda w: (w[0].startswith("worker-"), -w[1].gpus, -w[1].cpus)):
        roomy = [there for there in left.values() if fits(needs, there)]
        if not roomy:
            out.append((name, needs, shortage(needs, nodes, free) or "what is free is wanted by the other roles of the run"))
            continue
        tightest = min(roomy, key=lambda there: (there.get("GPU", 0.0), there.get("CPU", 0.0)))
        for resource, amount in amounts(needs).items():
            tightest[resource] -= amount
    return out


def shortfall_lines(wanted: Sequence[tuple[str, Needs]], nodes: Sequence[Node], free: Free) -> list[str]:
    """For a person, before anything is started: which roles find no place, why, and how many do; empty when all do."""
    missing = without_place(wanted, nodes, free)
    by_cause: dict[tuple[Needs, str], list[str]] = {}
    for name, needs, why in missing:
        by_cause.setdefault((needs, why), []).append(name)
    lines = []
    for (needs, why), names in by_cause.items():
        each = " each" if len(names) > 1 else ""
        lines.append(f"no place for {', '.join(sorted(names))} ({in_words(needs)}{each}): {why}")
    if lines:
        workers = [name for name, _ in wanted if name.startswith("worker-")]
        without = {name for name, _, _ in missing}
        lines.append(f"of {len(wanted)} roles {len(wanted) - len(without)} fit now, "
                     f"of {len(workers)} workers {sum(name not in without for name in workers)}")  # fmt: skip
    return lines


def _most(needs: Needs, nodes: Sequence[Node], by_node: Free) -> str:
    """Of the node that comes nearest: what it has of each resource that is asked for."""
    names = list(amounts(needs))
    best = max(nodes, key=lambda node: [by_node.get(node.id, {}).get(name, 0.0) for name in names])
    there = by_node.get(best.id, {})
    return " and ".join(f"{there.get(n, 0.0):g} {n}{'' if there.get(n, 0.0) == 1 else 's'}" for n in names) + f" on {best.name}"
