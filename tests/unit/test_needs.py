"""What roles reserve, and the words for a shortage."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.core.config import load_config
from rollbook.supervise.backend import Needs, Node
from rollbook.supervise.needs import fits, in_words, role_needs, shortage, shortfall_lines
from run_support import CONFIG

SMALL, LARGE = Node("a", "a", total={"CPU": 4.0}), Node("b", "b", total={"CPU": 8.0, "GPU": 2.0})
LEAVING = Node("c", "c", is_leaving=True, total={"CPU": 64.0, "GPU": 8.0})
EMPTY = {"a": {"CPU": 4.0}, "b": {"CPU": 8.0, "GPU": 2.0}, "c": {"CPU": 64.0, "GPU": 8.0}}


def test_every_role_reserves_what_the_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    more = ["ledger.standbys=1", "cluster.server_cpus=0.5", "workers.0.count=2", "workers.0.threads=3"]
    cuda = ["learner.device=cuda", "workers.0.device=cuda", "cluster.worker_gpus=0.4", "cluster.learner_gpus=2"]
    servers = {"ledger": Needs(0.5), "ledger-1": Needs(0.5), "feeder": Needs(0.5)}
    wanted = dict(role_needs(load_config(tmp_path / "run.toml", more)))
    assert wanted == servers | {"learner": Needs(1), "worker-0": Needs(3), "worker-1": Needs(3)}
    wanted = dict(role_needs(load_config(tmp_path / "run.toml", more + cuda)))
    assert wanted == servers | {"learner": Needs(1, 2.0), "worker-0": Needs(3, 0.4), "worker-1": Needs(3, 0.4)}


def test_needs_in_words() -> None:
    assert in_words(Needs(4, 1)) == "1 GPU and 4 CPUs" and in_words(Needs(0.1)) == "0.1 CPU" and in_words(Needs()) == "nothing"


@pytest.mark.parametrize(("left", "enough"), [(0.5, True), (0.3 + 0.2, True), (0.49, False)])
def test_a_share_fits_where_at_least_as_much_is_left(left: float, enough: bool) -> None:
    assert fits(Needs(0, 0.5), {"GPU": left}) is enough


def test_a_shortage_tells_what_no_node_has_from_what_others_have_taken() -> None:
    assert shortage(Needs(8, 2), [SMALL, LARGE], EMPTY) == ""
    assert shortage(Needs(1, 3), [SMALL, LARGE], EMPTY) == "no node has that many, the largest has 2 GPUs and 8 CPUs on b"
    taken = EMPTY | {"b": {"CPU": 2.0, "GPU": 1.0}}
    assert shortage(Needs(1, 2), [SMALL, LARGE], taken).endswith("they are taken, the most that is free is 1 GPU and 2 CPUs on b")
    assert shortage(Needs(1, 8), [SMALL, LEAVING], EMPTY).startswith("no node has that many"), "a leaving node takes nothing"
    assert shortage(Needs(1), [LEAVING], EMPTY) == "no node of the cluster takes roles"


def test_what_fits_and_what_does_not_is_told_by_name() -> None:
    wanted = [("ledger", Needs()), ("learner", Needs(1, 1)), *((f"worker-{i}", Needs(2, 1)) for i in range(3))]
    assert shortfall_lines(wanted[:3], [SMALL, LARGE], EMPTY) == []
    lines = shortfall_lines(wanted, [SMALL, LARGE], EMPTY)
    assert lines == [
        "no place for worker-1, worker-2 (1 GPU and 2 CPUs each): what is free is wanted by the other roles of the run",
        "of 5 roles 3 fit now, of 3 workers 1",
    ]
