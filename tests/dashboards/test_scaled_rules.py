"""Rules whose time runs faster: which numbers are divided, and that Prometheus takes what comes out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import scaled_rules


def rules(folder: Path) -> dict[str, dict[str, Any]]:
    groups = [group for path in sorted(folder.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule.get("alert", rule.get("record")): rule for group in groups for rule in group["rules"]}


def test_times_are_divided_and_ratios_counts_and_real_seconds_are_not(tmp_path: Path) -> None:
    scaled_rules.write(tmp_path, 30)
    before, after = rules(scaled_rules.RULES), rules(tmp_path)
    assert before.keys() == after.keys()
    for name, rule in before.items():
        assert ("for" in rule) == ("for" in after[name])
        if "for" in rule:
            assert after[name]["for"] == f"{max(scaled_rules.seconds(rule['for']) // 30, 1)}s", name
        ranges = [re.findall(r"\[(\w+)\]", one["expr"]) for one in (rule, after[name])]
        assert [f"{max(round(scaled_rules.seconds(r) / 30), 5)}s" for r in ranges[0]] == ranges[1], name
    assert after["LearnerStalled"]["expr"].startswith("sum by (run) (increase(rollbook_learner_steps_total[30s])) == 0")
    assert "offset 60s)) > 10" in after["DeadLetterGrowing"]["expr"]
    assert ", 60)" in after["CheckpointTooOld"]["expr"] and "1800" not in after["CheckpointTooOld"]["expr"]
    assert after["LedgerBacklog"]["expr"].endswith("> 20")
    limits = {"EssCollapse": "< 0.3", "WeightSyncFailing": "> 2.5", "RecoverySlow": "> 120", "LedgerSlow": "> 1"}
    for name, limit in limits.items():
        assert after[name]["expr"].endswith(limit), name


def test_prometheus_takes_the_scaled_rules(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("Prometheus is not installed")
    for factor in (1, 30, 600):
        written = scaled_rules.write(tmp_path, factor)
        done = subprocess.run(["promtool", "check", "rules", *map(str, written)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_whose_age_was_rewritten_is_refused() -> None:
    with pytest.raises(ValueError, match="LedgerBacklog"):
        scaled_rules.scaled({"alert": "LedgerBacklog", "expr": "max(x) > 700", "for": "10m"}, 30)
    with pytest.raises(ValueError, match="1h30m"):
        scaled_rules.divided("1h30m", 30, 1)
