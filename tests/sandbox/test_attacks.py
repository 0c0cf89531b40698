"""Every attack is contained by the zygote, and found to escape where nothing contains it: otherwise it would prove nothing."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.sandbox.attacks import arena
from rollbook.sandbox.attacks.probe import Result
from rollbook.sandbox.attacks.suite import ATTACKS
from rollbook.sandbox.selection import examine

NOBODY = 61234
USERS = {"root": 0, "unprivileged": NOBODY} if os.geteuid() == 0 else {"unprivileged": None}
NAMES = [attack.name for attack in ATTACKS]
NEEDS_ANOTHER_CONTROL = {"inherited_descriptors", "odd_name"}
"""Every backend starts programs with the descriptors that they are given and no others, also the one that contains nothing; and
one watcher watches them all."""
BY_RULES = (
    "named_socket", "named_datagram", "abstract_socket", "signal_host", "signal_parent", "signal_keeper", "signal_group",
    "odd_name", "change_files", "reschedule", "raise_limits", "disk_unlinked", "jobs_see_files",
)  # fmt: skip
"""Attacks on what landlock leaves in sight, where only its rules and the filter of calls stand before it."""
CONTROLS = [
    pytest.param(user, attack.name, id=f"{user}-{attack.name}")
    for user in USERS
    for attack in ATTACKS
    if attack.name not in NEEDS_ANOTHER_CONTROL and (user == "root" or not attack.control_as_root)
]


@pytest.fixture(autouse=True)
def _weak_backends_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@functools.cache
def results_of(backend: str, user: str, control: bool, names: tuple[str, ...] = ()) -> dict[str, Result]:
    examination = examine(backend, names, control=control, uid=USERS[user])
    assert not examination.unavailable, examination.unavailable
    return {result.attack: result for result in examination.results}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_zygote_contains_the_attack(name: str, user: str) -> None:
    result = results_of("zygote", user, False)[name]
    assert result.contained is True, result.reason


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("name", BY_RULES)
def test_landlock_contains_what_its_rules_leave_in_sight(name: str, user: str) -> None:
    result = results_of("landlock", user, False, BY_RULES)[name]
    assert result.contained is True, result.reason


@pytest.mark.parametrize(("user", "name"), CONTROLS)
def test_the_attack_escapes_where_nothing_contains_it(name: str, user: str) -> None:
    result = results_of("unsafe", user, True)[name]
    assert result.contained is False, result.reason


def test_a_descriptor_that_a_backend_passes_on_is_found() -> None:
    (result,) = examine("weak_backends:leaky_descriptors", ["inherited_descriptors"], control=True).results
    assert result.contained is False
    assert "secret came out" in result.reason


def test_a_watcher_that_an_odd_name_ends_is_found() -> None:
    (result,) = examine("weak_backends:fragile_watcher", ["odd_name"]).results
    assert result.contained is False and "service's own failure: infra_spawn" in result.reason


def test_there_are_more_attacks_than_rows_in_the_matrix_and_each_has_a_name_of_its_own() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 27


@pytest.mark.parametrize("argv", [["unsafe"], ["zygote", "--control"], ["weak_backends:leaky_network"]])
def test_what_does_not_contain_is_not_attacked_outside_an_arena(argv: list[str]) -> None:
    assert not arena.inside()
    paths = os.pathsep.join([str(Path(arena.__file__).parents[3]), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-m", "rollbook.sandbox.attacks", *argv, "--only=answers_file"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "only in an arena" in done.stdout


def test_a_backend_that_lets_something_escape_is_not_put_to_attacks_that_could_do_harm_outside_an_arena() -> None:
    paths = os.pathsep.join([str(Path(arena.__file__).parents[3]), str(Path(__file__).parent)])
    argv = ["weak_backends:leaky_network_called_zygote", "--only=loopback_tcp", "--only=write_outside", "--only=fork_bomb"]
    done = subprocess.run(
        [sys.executable, "-m", "rollbook.sandbox.attacks", *argv],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.count("not tried on this machine, since loopback_tcp escaped already") == 2
    assert "a listener outside was reached" in done.stdout


def test_an_arena_hides_the_temporary_files_and_the_processes_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    code = f"import os; print(os.path.exists({str(tmp_path)!r}), len([p for p in os.listdir('/proc') if p.isdigit()]))"
    done = subprocess.run(
        arena.command([sys.executable, "-c", code]),
        env={**os.environ, "PYTHONPATH": str(Path(arena.__file__).parents[3])}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "2"], done.stderr
    assert (tmp_path / "mine").read_text() == "kept"
