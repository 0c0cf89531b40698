"""The backend is chosen by what it contains, and says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.core.errors import ConfigError, Unavailable
from rollbook.core.sandboxing import Limits, Program
from rollbook.core.settings import SandboxConfig
from rollbook.sandbox import selection as selecting
from rollbook.sandbox.attacks.probe import Result
from rollbook.sandbox.attacks.suite import ATTACKS
from rollbook.sandbox.selection import CANDIDATES, Examination, Selection, kept, key_of, make_sandbox, select

LEAKY = "weak_backends:leaky_network"


@pytest.fixture(autouse=True)
def _weak_backends_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def test_a_backend_with_a_hole_is_passed_over_for_one_that_contains() -> None:
    selection = select(SandboxConfig(), candidates=(LEAKY, "zygote"))
    assert (selection.backend, selection.contained) == ("zygote", True)
    weak, strong = selection.examinations
    assert weak.failed() == ("loopback_tcp",)
    assert strong.failed() == ()
    assert {result.attack for result in strong.results} == {attack.name for attack in ATTACKS}
    assert Selection.from_json(selection.to_json()) == selection


def test_a_named_backend_that_lets_an_attack_escape_is_refused_by_name_of_the_attack() -> None:
    with pytest.raises(ConfigError, match=r"loopback_tcp escaped \(a listener outside was reached\)[\s\S]*doctor --sandbox"):
        select(SandboxConfig(backend=LEAKY))


def test_a_backend_that_cannot_be_made_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        select(SandboxConfig(), candidates=("nosuch",))


@pytest.mark.parametrize(
    ("backend", "said"),
    [("suite_killed", "the attack suite ended with 137"), ("trial_killed", "its trial was killed")],
)
def test_a_pass_that_is_killed_is_no_verdict(tmp_path: Path, backend: str, said: str) -> None:
    with pytest.raises(Unavailable, match=f"no backend contains the attacks here[\\s\\S]*{said}"):
        select(SandboxConfig(backend=f"weak_backends:{backend}"), tmp_path)
    assert list(tmp_path.glob("*.json")) == []


def test_a_pass_that_has_no_time_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "PASS_S", 0.2)
    with pytest.raises(Unavailable, match="did not end within 0 s"):
        select(SandboxConfig(backend="zygote"))


@pytest.mark.parametrize(
    ("untried", "kind"),
    [((["a"], ["b"]), Unavailable), ((["a", "b"], ["b"]), Unavailable), ((["a"], ["a"]), ConfigError), ((["a"], []), None)],
)
def test_what_cannot_be_tried_twice_in_the_same_way_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch, untried: tuple[list[str], list[str]], kind: type[Exception] | None
) -> None:
    """What disturbed a pass once does not disturb the next one in the same place; what this machine lacks does."""
    passes = [Examination("zygote", tuple(Result(n, None if n in names else True, "", 0.0) for n in "ab")) for names in untried]
    monkeypatch.setattr(selecting, "examine", lambda backend: passes.pop(0))
    if kind is None:
        assert select(SandboxConfig(backend="zygote")).backend == "zygote"
        return
    with pytest.raises(kind, match="could not be tried"):
        select(SandboxConfig(backend="zygote"))


def test_an_escape_stands_however_the_others_were_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = Examination("zygote", (Result("a", False, "it came out", 0.0), Result("b", None, "lost", 0.0)))
    monkeypatch.setattr(selecting, "examine", lambda backend: leaks)
    with pytest.raises(ConfigError, match="a escaped"):
        select(SandboxConfig(backend="zygote"))


def test_a_result_is_used_again_until_something_it_holds_for_changes(tmp_path: Path) -> None:
    config = SandboxConfig(backend="zygote")
    path = tmp_path / "sandbox-selection.json"
    first = select(config, tmp_path)
    assert select(config, tmp_path) == first == kept(path, key_of(config, ["zygote"]))
    key = key_of(config, ["zygote"])
    for changed in key:
        assert kept(path, {**key, changed: "another"}) is None, changed
    assert key_of(replace(config, memory_mb=256), ["zygote"]) != key
    assert select(config, tmp_path, fresh=True) != first  # the durations are those of another pass
    path.write_text("{")
    assert kept(path, key) is None


def test_unsafe_is_taken_only_by_its_name_and_says_that_it_contains_nothing() -> None:
    selection = select(SandboxConfig(backend="unsafe"))
    assert (selection.backend, selection.contained, selection.enforced) == ("unsafe", False, ())
    assert "unsafe" not in CANDIDATES


def test_the_sandbox_that_was_selected_runs_programs() -> None:
    config = SandboxConfig()
    sandbox = make_sandbox(config, Selection("zygote", True, (), "", 0))
    try:
        assert sandbox.run(Program("print(6 * 7)"), Limits()).stdout == b"42\n"
    finally:
        sandbox.close()


def test_the_doctor_shows_every_backend_and_the_one_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--sandbox", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["selection"]["backend"] == "zygote"
    assert [each["backend"] for each in shown["examined"]] == ["zygote", "bubblewrap", "landlock"]
