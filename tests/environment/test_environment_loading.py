"""Finding an environment by its name and making it: every way to be wrong is told with the way out."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rollbook.core.changes import ENVIRONMENT, changed_fields
from rollbook.core.config import Config, load_config, portable_code
from rollbook.core.environments import Context, Episode, RewardResult, ToolReply, ToolRequest, Turn
from rollbook.core.errors import ConfigError, VerifierError
from rollbook.core.sandboxing import Limits
from rollbook.tasks.environment import environment_digest, judges_in_process, limits_of, load_environment
from task_fixtures import make_config

BODY = """
from rollbook.core.environments import RewardResult, ToolReply, ToolRequest

class Tool:
    name, pure = "echo", True
    def call(self, arguments, earlier, context):
        return "said"

class Plain:
    def __init__(self, bonus=0.5, *, strict=False):
        self.bonus = bonus
    async def score(self, episode, context):
        return self.bonus

class WithTools(Plain):
    tools = [Tool()]
    def parse(self, text):
        return ToolRequest("echo", {}) if text else None

def factory(**settings):
    return Plain(**settings)

def demanding(rows, columns):
    return Plain()

def broken():
    return 1 / 0

ready = Plain(0.75)
number = 3
"""
CONTEXT = Context(None, Limits(), 1, "r/0.0", 1.0)


def mine(tmp_path: Path, attribute: str, extra: str = "", **settings: Any) -> Config:
    # A file is imported once a process, so each body needs its own.
    file = tmp_path / "mine.py"
    file.write_text(BODY + extra)
    return make_config(environment={"name": f"{file}:{attribute}", "settings": settings})


def score(config: Config, text: str = "x") -> RewardResult:
    return asyncio.run(load_environment(config).score(Episode({}, (Turn(text),)), CONTEXT))


@pytest.mark.parametrize(
    ("attribute", "settings", "value"),
    [("Plain", {}, 0.5), ("Plain", {"bonus": 0.25}, 0.25), ("factory", {"bonus": 1.0}, 1.0), ("ready", {}, 0.75)],
)
def test_classes_factories_and_objects_are_environments(tmp_path: Path, attribute: str, settings: dict, value: float) -> None:
    assert score(mine(tmp_path, attribute, **settings)) == RewardResult(value)


def test_what_is_optional_has_defaults(tmp_path: Path) -> None:
    plain = load_environment(mine(tmp_path, "Plain"))
    assert plain.tools == () and not plain.needs_sandbox and plain.parse("[1]") is None and plain.concurrent
    tools = load_environment(mine(tmp_path, "WithTools"))
    assert tools.pure_tools == {"echo": True} and not tools.concurrent
    assert tools.render(ToolReply("as it is")) == "as it is"
    request = tools.parse("x")
    assert request is not None and tools.parse("") is None
    assert asyncio.run(tools.call_tool(request, [], CONTEXT)) == ToolReply("said")
    with pytest.raises(ConfigError, match="brings no tasks: it has no load"):
        plain.load("train")


def test_a_reply_whose_blame_is_none_of_ours_is_an_error(tmp_path: Path) -> None:
    extra = """
class Blames(Tool):
    def call(self, arguments, earlier, context):
        return ToolReply("", failed=True, blame="model")
WithTools.tools = [Blames()]
"""
    environment = load_environment(mine(tmp_path, "WithTools", extra))
    with pytest.raises(VerifierError, match="blame must be a Blame or None"):
        asyncio.run(environment.call_tool(ToolRequest("echo", {}), [], CONTEXT))


@pytest.mark.parametrize(
    ("attribute", "settings", "said"),
    [
        ("Plian", {}, "has no 'Plian'; did you mean 'Plain'?"),
        ("Plain", {"bonsu": 1}, "takes no setting environment.settings.bonsu; did you mean 'bonus'?"),
        ("Plain", {"zzz": 1}, "takes no setting environment.settings.zzz; it takes bonus, strict"),
        ("demanding", {"rows": 1}, "needs the setting environment.settings.columns"),
        ("broken", {}, "making it raised ZeroDivisionError"),
        ("ready", {"bonus": 1}, "is an object already and takes no environment.settings"),
        ("number", {}, "is a int without score(episode, context)"),
    ],
)
def test_a_wrong_name_or_setting_is_told(tmp_path: Path, attribute: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(mine(tmp_path, attribute, **settings))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("def scores(self, episode, context): pass", "so it is no environment; did you mean 'scores'?"),
        ("def score(self, episode): pass", "score must take (episode, context)"),
        ("score = print\n    tools = 3", "tools is a int"),
        ("score = print\n    tools = [Tool(), Tool()]\n    parse = print", "two of its tools have one name"),
        ("score = print\n    tools = [Tool()]", "has tools but no parse(text)"),
        ("score = print\n    tools = [object()]", "has no name"),
        ("score = print\n    tools = [Vague()]\n    parse = print", "does not say whether it is pure"),
        ("score = print\n    tools = [Short()]\n    parse = print", "must take (arguments, earlier, context)"),
        ("score = print\n    render = 3", "render is a int, expected a method"),
        ("score = print\n    needs_sandbox = 'yes'", "needs_sandbox = 'yes', expected True or False"),
        ("score = print\n    async def load(self, split): pass", "load is a coroutine function"),
    ],
)
def test_what_is_no_environment_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    extra = f"""
class Vague:
    name = "vague"

class Short:
    name, pure = "short", False
    def call(self): pass

class Wrong:
    {lines}
"""
    with pytest.raises(ConfigError) as caught:
        load_environment(mine(tmp_path, "Wrong", extra))
    assert said in str(caught.value)


def test_an_installed_package_offers_environments_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollbook.environments]\nmazes = offered_mazes:Plain\n")
    (tmp_path / "offered_mazes.py").write_text(BODY)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(environment={"name": "mazes", "settings": {"bonus": 0.125}})
    assert score(config) == RewardResult(0.125)
    assert environment_digest(config) != environment_digest(make_config(environment={"name": "mazes"}))
    with pytest.raises(ConfigError, match="no installed package offers it.*did you mean 'mazes'"):
        load_environment(make_config(environment={"name": "maze"}))


def test_without_a_name_the_reward_function_is_the_environment() -> None:
    config = make_config()
    result = asyncio.run(load_environment(config).score(Episode({"answer": "7"}, (Turn(" 7"),)), CONTEXT))
    assert result == RewardResult(1.0) and judges_in_process(config)
    assert not judges_in_process(make_config(task={"reward": "somewhere:reward"}))
    assert not judges_in_process(make_config(environment={"name": "somewhere:Environment"}))


def test_the_limits_of_a_job_are_those_of_the_configuration() -> None:
    limits = limits_of(make_config(sandbox={"memory_mb": 64, "output_kb": 2, "disk_mb": 3, "cpu_s": 1, "processes": 5}).sandbox)
    assert limits == Limits(1.0, 10.0, 64 << 20, 5, 2 << 10, 3 << 20)


def test_a_relative_file_is_found_beside_the_configuration_and_portable_in_digests(tmp_path: Path) -> None:
    configs = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(BODY)
        (folder / "c.toml").write_text(
            '[run]\nid = "t"\ndir = "run"\nsteps = 1\n[model]\npath = "m"\n[task]\nsource = "environment"\n'
            '[environment]\nname = "mine.py:Plain"\nsettings = {bonus = 0.25}\n'
            '[learner]\ngroups_per_step = 1\ngroup_size = 2\n[[workers]]\nengine = "transformers"\n'
        )
        configs.append(load_config(folder / "c.toml"))
    assert configs[0].environment.name == f"{tmp_path / 'here' / 'mine.py'}:Plain"
    assert score(configs[1]) == RewardResult(0.25)
    assert configs[0].digest() == configs[1].digest()
    assert environment_digest(configs[0]) == environment_digest(configs[1])
    assert changed_fields(configs[0].to_json(), configs[1].to_json()).keys() <= {"model.path", "run.dir"}
    (tmp_path / "there" / "mine.py").write_text(BODY + "\n")
    assert environment_digest(configs[0]) != environment_digest(configs[1])


@pytest.mark.parametrize(
    ("spec", "portable"),
    [
        ("/a/b/mine.py:Plain", "mine.py:Plain"),
        ("verl:/a/b/mine.py:score", "verl:mine.py:score"),
        ("verl:/a/b/mine.py", "verl:mine.py"),
        ("package.module:Plain", "package.module:Plain"),
        ("rg:chain_sum", "rg:chain_sum"),
        ("mazes", "mazes"),
        ("", ""),
    ],
)
def test_the_name_of_code_is_portable_without_its_folder(spec: str, portable: str) -> None:
    assert portable_code(spec) == portable


def test_budgets_of_the_environment_are_not_part_of_what_is_computed() -> None:
    plain = make_config()
    hasty = make_config(environment={"score_s": 1, "tool_s": 1, "processes": 2, "attempts_max": 1}, sandbox={"slots": 9})
    assert plain.digest() == hasty.digest()
    assert plain.digest() != make_config(environment={"turns_max": 2}).digest()
    assert plain.digest() != make_config(sandbox={"memory_mb": 64}).digest()
    assert changed_fields(plain.to_json(), hasty.to_json()) == {}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"task": {"source": "environment"}}, "environment.name is missing"),
        ({"environment": {"settings": {"x": 1}}}, "environment.settings are given, but environment.name is empty"),
        ({"environment": {"processes": 0}}, "environment.processes = 0: must be at least 1"),
        ({"environment": {"score_s": 0}}, "environment.score_s = 0.0: must exceed 0"),
        ({"sandbox": {"backend": "docker"}}, "sandbox.backend = 'docker': one of 'auto'"),
        ({"sandbox": {"slots": 1}}, "sandbox.slots = 1: must be at least 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(sections: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**sections)
    assert said in str(caught.value)


def test_an_environment_may_judge_tasks_of_a_file(tmp_path: Path) -> None:
    config = mine(tmp_path, "Plain")
    assert config.task.source == "jsonl" and dataclasses.replace(config) == config


def test_the_input_has_a_name_of_its_own() -> None:
    assert ENVIRONMENT == "environment.source_sha256"
