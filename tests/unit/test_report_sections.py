"""The report's explanations, the comparison of runs, and the mirrors: bounds on both sides, nothing twice, nothing invented."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from run_support import CONFIG

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from ledger_support import Scene, run_record

from rollbook.cli import viewing
from rollbook.cli.main import main
from rollbook.core.config import Config, load_config
from rollbook.core.errors import ConfigError
from rollbook.core.host import COMMAND_HOLDER
from rollbook.core.records import Blame, FailureReport, RewardStatus, Role
from rollbook.ledger.ledger import Ledger
from rollbook.ledger.readonly import Reader
from rollbook.report import heldout, mirror, sections
from rollbook.report.compare import named_apart
from rollbook.report.html import write
from rollbook.report.top import sparkline, top_lines


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run.toml").write_text(CONFIG)
    return load_config(tmp_path / "run.toml", ["run.id=run", f"run.dir={tmp_path}/run", "schedule.max_lag_versions=2"])


@pytest.fixture
def scene(config: Config) -> Iterator[Scene]:
    Path(config.run.dir).mkdir()
    with Ledger(config.ledger.url, holder="server") as ledger:
        scene = Scene(ledger, run_record(steps=3))
        for step in (1, 2):
            scene.feed(2)
            scene.fill()
            scene.train(step)
        yield scene


def steps(**columns: list[Any]) -> list[dict[str, Any]]:
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) | {"step": i + 1, "finished_at_s": 100.0 + i} for i, row in enumerate(rows)]


def test_a_diagnostic_at_its_bound_is_within_and_one_beyond_is_named_with_its_steps(config: Config) -> None:
    at = sections.off_policy(config, steps(lag_head_max=[1.0, 2.0], ess_token_raw_fraction=[0.9, 0.3]))
    assert "never" in at and "2 steps" not in at and "1 steps" not in at
    beyond = sections.off_policy(config, steps(lag_head_max=[3.0, 2.0, 3.0], ess_token_raw_fraction=[0.9, 0.29, 0.5]))
    assert "2 steps: 1, 3" in beyond and "1 steps: 2" in beyond
    assert "no steps" in sections.off_policy(config, [])
    assert "never" in sections.off_policy(config, steps(lag_head_max=[float("nan"), 1.0])), "what is no number crosses nothing"


def test_the_bound_of_the_fixed_schedule_is_its_lag(config: Config, tmp_path: Path) -> None:
    fixed = load_config(tmp_path / "run.toml", ["schedule.kind=fixed", "schedule.lag_versions=0"])
    assert next(b.value for b in sections.bounds_of(fixed) if b.name == "lag_head_max") == 0
    assert next(b.value for b in sections.bounds_of(config) if b.name == "lag_head_max") == 2


def test_tokens_are_counted_by_lag_over_all_steps(config: Config) -> None:
    page = sections.staleness(
        config, steps(lag_0_tokens=[30.0, 30.0], lag_0_rho_mean=[1.0, 1.0], lag_2_tokens=[0.0, 20.0], lag_2_rho_mean=[0.0, 1.5],
                      lag_span_max=[0.0, 1.0]),
    )  # fmt: skip
    assert "<td>0</td><td>60</td><td>75.0%</td><td>1.0000</td>" in page
    assert "<td>2</td><td>20</td><td>25.0%</td><td>1.5000</td>" in page and "less one: 1." in page


def test_held_out_measurements_are_kept_once_a_version_and_drawn(config: Config) -> None:
    assert heldout.kept(config.run.dir) == []
    for version, greedy in ((2, 0.5), (0, 0.1), (2, 0.6)):
        file = heldout.keep(config.run.dir, {"version": version, "n": 10, "greedy": greedy, "sampled": greedy / 2})
    file.write_text(file.read_text() + "half a li")
    rows = heldout.kept(config.run.dir)
    assert [(r["version"], r["greedy"]) for r in rows] == [(0, 0.1), (2, 0.6)]
    panels = dict(sections.curves(config, steps(reward_mean=[0.1, 0.2]), rows))
    assert panels["held-out mean reward by version"]["held-out, greedy"] == ([0, 2], [0.1, 0.6])


def test_a_take_over_is_a_recovery_with_its_times_and_a_first_holder_is_none(config: Config, scene: Scene) -> None:
    with Reader(config.ledger.url, "run") as rows:
        assert "none: no role" in sections.recoveries(rows.recoveries(), scene.ledger.step_metrics(0))
        scene.learner = scene.ledger.acquire_role(Role.LEARNER, "learner-2", 60.0, supersede="learner-1")
        scene.feed(2)
        scene.fill()
        scene.train(3)
        page = sections.recoveries(rows.recoveries(), scene.ledger.step_metrics(0))
    assert page.count("role_acquired") == 1 and "role learner" in page and "epoch 2" in page
    assert "<td>-</td>" not in page, "a step was finished before it and after it"
    assert "not read: &lt;gone&gt;" in sections.recoveries(None, [], "<gone>")


def test_a_worker_that_came_later_is_a_recovery_and_looking_and_tidying_are_none(config: Config, scene: Scene) -> None:
    assert scene.worker("later") and scene.worker("<b>latest</b>")
    for step in (0, 1, 2):
        scene.checkpoint(step)
    scene.ledger.mark_checkpoint(scene.learner, 0, 0, "deleting")
    scene.ledger.close()
    look = Ledger(config.ledger.url, holder=f"{COMMAND_HOLDER}1")
    with look, Reader(config.ledger.url, "run") as rows:
        look.attach("run")
        page = sections.recoveries(rows.recoveries(), look.step_metrics(0))
    with Ledger(config.ledger.url, holder="successor") as ledger, Reader(config.ledger.url, "run") as rows:
        ledger.attach("run")
        after = sections.recoveries(rows.recoveries(), ledger.step_metrics(0))
    assert page.count("worker_started") == 2 and "worker later" in page and "&lt;b&gt;latest" in page
    assert "checkpoint_marked" not in page and "server_attached" not in page
    assert after.count("server_attached") == 1 and "epoch 3" in after


def test_the_whole_report_has_every_section_and_says_what_failures_cost(config: Config, scene: Scene) -> None:
    scene.feed(1)
    grant = scene.lease(1)[0]
    report = FailureReport(grant.key, grant.token, scene.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow", n_tokens=7,
                           generate_s=2.0, verify_s=1.0)  # fmt: skip
    scene.ledger.report_failures([report])
    with Reader(config.ledger.url, "run") as rows:
        file = write(config, scene.ledger, scene.ledger.step_metrics(0), Path(config.run.dir) / "report", None, rows)
    page = html.unescape(file.read_text())
    titles = ("Curves", "Staleness", "Off-policy diagnostics", "Drop bias", "Time and cost", "Recoveries", "Manifest")
    for title in (*titles, "Configuration"):
        assert f"<h2>{title}</h2>" in page
    assert "<th>steps trained</th><td>2</td>" in page and "<th>policy version</th><td>2, digest" in page and "{'" not in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//|@import|url\(", page), "it loads nothing"
    assert "failed attempts, timeout (unclear)</td><td>3.0" in page and "By difficulty" in page and "By length" in page


def test_two_runs_are_compared_on_the_same_axes_by_a_command(
    config: Config, scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene.ledger.close()
    (tmp_path / "a.toml").write_text(CONFIG.replace('id = "tiny"', 'id = "run"'))
    out = tmp_path / "out"
    assert main(["compare", str(tmp_path / "a.toml"), "--to", str(out)]) == 2
    assert main(["compare", str(tmp_path / "a.toml"), str(tmp_path / "a.toml"), "--to", str(out)]) == 0
    found = json.loads((out / "compare.json").read_text())
    assert found["numbers"]["steps"] == [2, 2] and found["numbers"]["reward_mean, last tenth"] == [0.25, 0.25]
    page = (out / "compare.html").read_text()
    assert page.count("data:image/png;base64") == 2 and "the same computation" in page and "+0" in page


def test_what_a_sample_cost_is_not_told_from_a_part_of_the_rows() -> None:
    made = steps(tokens=[1000.0, 1000.0], seconds_step=[2.0, 2.0])
    seconds, slots = {"samples": 4, "tokens": 8, "generate_s": 3.0, "verify_s": 1.0}, {"applied": 3, "planned": 1}
    lost = [{"status": "timeout", "blame": "infra", "seconds": 2.0}]
    whole = sections.time_and_cost({"slots": slots}, made, seconds, lost)
    assert "<td>process-seconds per trained sample</td><td>2.5</td>" in whole, "10 s over 4 samples"
    assert "<td>process-seconds per 1,000 trained tokens</td><td>5</td>" in whole and "2.0 s (20.0%)" in whole
    part = sections.time_and_cost({"slots": slots, "retention": {"groups": 7}}, made, seconds, lost)
    assert "per trained sample" not in part and "per 1,000" not in part and "Rows of 7 groups were let go" in part


def test_runs_of_the_same_id_are_told_apart_by_their_directories(config: Config) -> None:
    def at(run_id: str, folder: str) -> Config:
        return dataclasses.replace(config, run=dataclasses.replace(config.run, id=run_id, dir=folder))

    assert named_apart([at("a", "/x/one"), at("b", "/x/one")]) == ["a", "b"]
    assert named_apart([at("a", "/x/one"), at("a", "/x/two"), at("b", "/y/two")]) == ["a (/x/one)", "a (/x/two)", "b"]
    assert named_apart([at("a", "/x/one"), at("a", "/x/two")]) == ["a (one)", "a (two)"]
    assert named_apart([at("a", "/x/one"), at("a", "/y/one")]) == ["a (/x/one)", "a (/y/one)"]


def test_the_screen_of_top_fits_its_width_and_loses_no_count(config: Config, scene: Scene) -> None:
    scene.feed(1)
    why = (RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow \x1b[2J " + "long " * 99)
    scene.ledger.report_failures([FailureReport(grant.key, grant.token, scene.incarnation, *why) for grant in scene.lease(2)])
    for width in (60, 80, 200):
        lines = top_lines(scene.ledger.run_status(), scene.ledger.step_metrics(0), config, 0.0, width)
        assert max(map(len, lines)) <= width and "\x1b" not in "".join(lines)
        whole = " ".join(" ".join(lines).split())
        assert "2 timeout: slow" in whole and "2 attempts without a sample" in whole and "verdicts 0" in whole, width


def test_top_shows_a_run_whose_server_is_gone_and_says_that_it_is_old(
    config: Config, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.ledger.close()
    slept: list[float] = []
    monkeypatch.setattr(viewing, "LOOK_S", 0.0)
    monkeypatch.setattr(viewing, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=slept.append))
    looks = viewing._looks(config, 2.0)
    assert "step 2/3" in next(looks)
    again = next(looks)
    assert again.startswith("NO LEDGER SERVER ANSWERS") and "what follows is old" in again and "step 2/3" in again
    assert slept[0] >= 2.0
    with pytest.raises(ConfigError, match="never started"):
        next(viewing._looks(load_config(tmp_path / "run.toml", [f"run.dir={tmp_path}/nothing"]), 2.0))


def test_one_line_of_blocks_shows_the_shape() -> None:
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█" and sparkline([5.0] * 9, 3) == "▁▁▁" and sparkline([], 5) == ""
    assert len(sparkline(list(range(1000)), 40)) == 40


class Kept:
    """A writer that keeps what it is given; ``mirror.WRITERS`` is the place where writers are named."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.steps: list[int] = []
        self.is_open = True
        made.append(self)

    def write(self, step: int, at_s: float, values: Mapping[str, float]) -> None:
        assert self.is_open and at_s > 0 and "step" not in values
        self.steps.append(step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_open = False


made: list[Kept] = []


def test_a_mirror_has_every_step_once_however_often_it_is_opened(
    config: Config, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.clear()
    monkeypatch.setitem(mirror.WRITERS, "tensorboard", Kept)
    first = mirror.Mirror(config, "tensorboard")
    assert first.update(scene.ledger) == 2 and first.update(scene.ledger) == 0
    scene.feed(2)
    scene.fill()
    scene.train(3)
    assert first.update(scene.ledger) == 1
    leftover = Path(config.run.dir) / "mirror" / "tensorboard" / "old"
    leftover.touch()
    resumed = mirror.Mirror(config, "tensorboard")
    assert resumed.update(scene.ledger) == 3 and not leftover.exists(), "made anew from the ledger"
    assert [kept.steps for kept in made] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("name", sorted(mirror.NEEDS))
def test_a_mirror_whose_package_is_absent_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, mirror.NEEDS[name], None)
    with pytest.raises(ConfigError, match=rf"{name}.*rollbook\[mirror\]"):
        mirror.check_mirrors([name])


def test_a_mirror_that_nobody_knows_is_refused_by_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    assert load_config(tmp_path / "run.toml", ['run.mirror=["wandb"]']).run.mirror == ("wandb",)
    with pytest.raises(ConfigError, match="none of tensorboard, wandb"):
        load_config(tmp_path / "run.toml", ['run.mirror=["aim"]'])


def test_tensorboard_reads_what_was_mirrored(config: Config, scene: Scene) -> None:
    pytest.importorskip(mirror.NEEDS["tensorboard"], reason="TENSORBOARD NOT INSTALLED: its mirror was not written for real")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="TENSORBOARD NOT INSTALLED")
    for _ in range(2):
        mirrored = mirror.Mirror(config, "tensorboard")
        mirrored.update(scene.ledger)
        mirrored.close()
    (file,) = (Path(config.run.dir) / "mirror" / "tensorboard").iterdir()
    events = [e for e in loader.EventFileLoader(str(file)).Load() if e.summary.value]
    assert [e.step for e in events] == [1, 2]
    assert {v.tag for v in events[0].summary.value} == {"rollbook/loss", "rollbook/reward_mean"}


def test_wandb_keeps_an_offline_run(config: Config, scene: Scene) -> None:
    pytest.importorskip("wandb", reason="WANDB NOT INSTALLED: its mirror was not written for real")
    for _ in range(2):
        mirrored = mirror.Mirror(config, "wandb")
        mirrored.update(scene.ledger)
        mirrored.close()
    assert len(list((Path(config.run.dir) / "mirror" / "wandb").glob("wandb/offline-run-*/*.wandb"))) == 1
