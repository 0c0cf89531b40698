"""What the Ray backend decides without a cluster: what it refuses, what it carries to other nodes, what it says of an error."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ray_support import needs_ray
from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.core.settings import SecurityConfig
from rollbook.supervise.backend import LEARNER, LEDGER, WORKER, Needs, Node, Order
from run_support import CONFIG, TinyRun

pytestmark = needs_ray


def test_an_address_where_no_cluster_answers_is_named_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody can answer there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = TinyRun(tmp_path)
        code, text = run.command("up", str(run.config), "--ray", address)
    assert code == 1 and f"no Ray cluster answers at '{address}'" in text
    assert not (run.dir / "logs").exists()


def test_no_secret_of_the_environment_is_carried_to_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollbook.supervise.ray_backend import carried_environment

    for name in ("PGPASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ROLLBOOK_INCARNATION", "ROLLBOOK_TOKEN"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("ROLLBOOK_FAILPOINTS", "learner.after_publish=crash")
    carried = carried_environment()
    assert "hidden" not in carried.values() and carried["ROLLBOOK_FAILPOINTS"] == "learner.after_publish=crash"


@pytest.mark.parametrize(
    ("listens", "nodes", "is_refused"),
    [
        ("127.0.0.1:0", ["10.0.0.2", "10.0.0.3"], True),
        ("127.0.0.1:0", ["10.0.0.2", "10.0.0.2"], False),
        ("127.0.0.1:0", ["127.0.0.2", "127.0.0.3"], False),
        ("0.0.0.0:0", ["10.0.0.2", "10.0.0.3"], False),
    ],
)
def test_a_ledger_on_loopback_is_refused_where_other_machines_have_to_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: str, nodes: list[str], is_refused: bool
) -> None:
    from rollbook.supervise.ray_backend import RayBackend

    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml")
    security = SecurityConfig(certificate="c", key="k", ca="a", tokens="t")
    config = replace(config, ledger=replace(config.ledger, address=listens), security=security)
    found = [Node(f"{address} ({i})", str(i)) for i, address in enumerate(nodes)]
    backend = RayBackend(config, {})
    monkeypatch.setattr(backend, "nodes", lambda: found)
    if not is_refused:
        backend.check(config)
        return
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2, 10\.0\.0\.3 cannot reach"):
        backend.check(config)


GPU_NODE, PLAIN, BUSY = "g", "p", "b"
NODES = [
    Node(GPU_NODE, GPU_NODE, total={"CPU": 32.0, "GPU": 4.0}), Node(PLAIN, PLAIN, total={"CPU": 8.0}),
    Node(BUSY, BUSY, total={"CPU": 8.0}),
]  # fmt: skip
FREE = {GPU_NODE: {"CPU": 32.0, "GPU": 4.0}, PLAIN: {"CPU": 8.0}, BUSY: {"CPU": 1.0}}


@pytest.mark.parametrize(
    ("kind", "needs", "others", "expected"),
    [
        (WORKER, Needs(1), [], PLAIN),
        (WORKER, Needs(1), [PLAIN], BUSY),
        (WORKER, Needs(1), [PLAIN, BUSY], GPU_NODE),
        (WORKER, Needs(1, 1), [], GPU_NODE),
        (WORKER, Needs(2), [PLAIN, GPU_NODE, GPU_NODE], PLAIN),
        (WORKER, Needs(64), [], ""),
        (LEDGER, Needs(), [], PLAIN),
        (LEDGER, Needs(), [PLAIN], BUSY),
        (LEDGER, Needs(2), [PLAIN], GPU_NODE),
        (LEDGER, Needs(64), [PLAIN], ""),
        (LEARNER, Needs(1), [], ""),
    ],
)
def test_workers_are_spread_and_every_ledger_server_has_a_node_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, needs: Needs, others: list[str], expected: str
) -> None:
    from rollbook.supervise.ray_backend import RayBackend

    (tmp_path / "run.toml").write_text(CONFIG)
    backend = RayBackend(load_config(tmp_path / "run.toml"), {})
    monkeypatch.setattr(backend, "nodes", lambda: NODES)
    monkeypatch.setattr(backend, "free", lambda: FREE)
    monkeypatch.setattr(backend, "_nodes_of", lambda kind, but: others)
    order = Order("one", kind, (), {}, Path("log"), needs)
    assert backend._target(order, NODES) == expected
    if kind == LEARNER:
        assert backend._target(order, NODES[1:]) == PLAIN, "Ray must not be left to choose a node that is leaving"


def test_a_paragraph_of_an_error_becomes_a_line() -> None:
    from rollbook.supervise.ray_backend import _brief

    text = "The actor died unexpectedly.\n\tclass_name: RoleHost\n\tpid: 3\nThe node has died.\nThe node has died.\n  File x"
    assert _brief(Unavailable(text)) == "The actor died unexpectedly. The node has died."
    assert len(_brief(Unavailable("x" * 1000))) == 400 and _brief(ValueError()) == "ValueError"
