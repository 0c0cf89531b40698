"""The ledger servers of a supervised run: names, who holds the role, what a dead one leaves."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rollbook.core.config import Config, config_from_table
from rollbook.rpc.address import announce, announced, write_address
from rollbook.supervise.ledgers import forget_server, forget_servers, holder, server_arguments
from run_support import CONFIG


def config(standbys: int) -> Config:
    return config_from_table(tomllib.loads(CONFIG) | {"ledger": {"standbys": standbys}})


@pytest.mark.parametrize(
    ("standbys", "expected"),
    [(0, {"ledger": []}), (2, {"ledger": [], "ledger-1": ["--index", "1"], "ledger-2": ["--index", "2"]})],
)
def test_every_server_has_a_name_and_the_first_is_started_first(standbys: int, expected: dict[str, list[str]]) -> None:
    named = server_arguments(config(standbys))
    assert named == expected and list(named) == list(expected)


def test_the_holder_is_who_the_run_directory_names_first_and_the_first_server_where_it_names_nobody(tmp_path: Path) -> None:
    assert holder(tmp_path) == "ledger"
    write_address(tmp_path, "a:1")
    assert holder(tmp_path) == "ledger"
    announce(tmp_path, 0, "a:1")
    announce(tmp_path, 1, "b:2")
    assert holder(tmp_path) == "ledger"
    write_address(tmp_path, "b:2", ["a:1"])
    assert holder(tmp_path) == "ledger-1"


def test_a_server_that_has_ended_is_forgotten_by_its_name(tmp_path: Path) -> None:
    announce(tmp_path, 0, "a:1")
    announce(tmp_path, 1, "b:2")
    write_address(tmp_path, "b:2", ["a:1"])
    forget_server(tmp_path, "ledger-1")
    assert announced(tmp_path) == {0: "a:1"} and (tmp_path / "ledger.address").read_text() == "a:1\n"
    forget_server(tmp_path, "ledger")
    assert list(tmp_path.iterdir()) == []
    announce(tmp_path, 0, "a:1")
    forget_servers(tmp_path)
    assert list(tmp_path.iterdir()) == []
