"""The rules with time running N times as fast, so that a drill of minutes shows what takes hours in operation.

Owns which numbers of a rule are times: every `for`, every range and offset, and the limits that are ages in seconds, all divided
by N. Ratios, counts and quantiles keep their limits, so one on a count (`> 2.5` in 15 minutes) is reached N times less easily.
Two limits in seconds stay as they are, because what they measure does not run faster: the time of a commit and of a recovery. A
range never gets shorter than five scrapes, or `rate` would find nothing. Nothing of this belongs into operation.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).resolve().parents[1] / "prometheus" / "rules"
FACTOR = 30
RANGE_MIN_S = 5
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
AGES: dict[str, tuple[tuple[str, int], ...]] = {
    "CheckpointTooOld": ((", {})", 1800),),
    "LedgerBacklog": (("> {}", 600),),
}
"""Limits that are ages in seconds: alert to (how it is written, its value)."""


def seconds(text: str) -> int:
    """Of a Prometheus duration with one unit. Raises ValueError for any other."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise ValueError(f"{text!r}: a number and one of s, m, h, d")
    return int(match[1]) * UNITS_S[match[2]]


def divided(text: str, factor: float, least_s: int) -> str:
    """A duration divided by ``factor``, in whole seconds."""
    return f"{max(round(seconds(text) / factor), least_s)}s"


def scaled(rule: dict[str, Any], factor: float) -> dict[str, Any]:
    """One rule with its times divided. Raises ValueError where an age that is known is not found."""
    expression = re.sub(r"\[(\d+[smhd])\]", lambda m: f"[{divided(m[1], factor, RANGE_MIN_S)}]", rule["expr"])
    expression = re.sub(r"offset (\d+[smhd])", lambda m: f"offset {divided(m[1], factor, RANGE_MIN_S)}", expression)
    for form, age_s in AGES.get(rule.get("alert", ""), ()):
        if expression.count(form.format(age_s)) != 1:
            raise ValueError(f"{rule['alert']}: there is no {form.format(age_s)!r} in: {expression}")
        expression = expression.replace(form.format(age_s), form.format(f"{age_s / factor:g}"))
    made = rule | {"expr": expression}
    return made | ({"for": divided(rule["for"], factor, 1)} if "for" in rule else {})


def write(folder: Path, factor: float = FACTOR) -> list[Path]:
    """Every file of rules, scaled, below ``folder``; evaluated every second."""
    written = []
    for path in sorted(RULES.glob("*.yml")):
        groups = yaml.safe_load(path.read_text())["groups"]
        made = [group | {"interval": "1s", "rules": [scaled(rule, factor) for rule in group["rules"]]} for group in groups]
        target = folder / path.name
        target.write_text(yaml.safe_dump({"groups": made}, sort_keys=False, width=130))
        written.append(target)
    return written


def main() -> int:
    """Write them."""
    parser = argparse.ArgumentParser(description="the alert rules with every duration divided by a factor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=float, default=FACTOR)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    print("\n".join(map(str, write(args.folder, args.factor))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
