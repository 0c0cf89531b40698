"""Asks a running Prometheus every query of the dashboards: does each return finite data, and does a panel use what is exported?

Owns how Grafana's variables are filled in. Never judges whether a value is good. Exit codes: 0 all is shown, 1 something is empty
or refused, 2 Prometheus does not answer.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from metric_names import UNUSED
from prometheus_server import NotReady, ask

DASHBOARDS = Path(__file__).resolve().parents[1]
MAY_BE_EMPTY = frozenset({
    "Engine requests", "Engine cache", "Tensor cores and device errors", "GPU memory", "Memory used", "Kernels running",
    "Reward latency", "Recovery time", "Lost to faults", "Importance ratio", "Circuit breaker", "Groups without variance",
})  # fmt: skip
"""Panels of a live run that have nothing to show without GPUs, faults, an environment or a first step."""
STEPS_MAX = 300
FAMILY = re.compile(r"_(bucket|sum|count)$")


@dataclass
class Findings:
    """What was asked and what is wrong."""

    queries: int = 0
    bad: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    """Empty, and allowed to be."""
    unused: list[str] = field(default_factory=list)
    """Exported, and on no panel, in no rule and in no list."""


def check(
    url: str, boards: Iterable[Path], start: float, end: float, may_be_empty: Collection[str] = MAY_BE_EMPTY, run: str = ""
) -> Findings:
    """Ask everything over a span of time, of one run or the last by name. Raises NotReady where Prometheus does not answer."""
    found, used = Findings(), _rules()
    for path in boards:
        board = json.loads(path.read_text())
        values = _variables(url, board, start, end, found, run)
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                used.append(target["expr"])
                found.queries += 1
                where = f"{board['uid']}: {panel['title']} {target['refId']}"
                wrong = _wrong(url, fill_in(target["expr"], values), start, end)
                if wrong is not None:
                    allowed = panel["title"] in may_be_empty and wrong == "no series"
                    (found.empty if allowed else found.bad).append(f"{where}: {wrong}")
        for note in board["annotations"].get("list", ()):
            used.append(note["expr"])
            wrong = _wrong(url, fill_in(note["expr"], values), start, end)
            if wrong not in (None, "no series"):
                found.bad.append(f"{board['uid']}: note {note['name']}: {wrong}")
    names = ask(url, "label/__name__/values", start=start, end=end)
    exported = {FAMILY.sub("", name) for name in names if name.startswith("rollbook_")}
    everything = "\n".join(used)
    shown = {name for name in exported if re.search(rf"\b{name}(_bucket|_sum|_count)?\b", everything)}
    found.unused = sorted(exported - shown - set(UNUSED))
    return found


def fill_in(expression: str, values: Mapping[str, str]) -> str:
    """An expression as Grafana would send it."""
    for name in sorted(values, key=len, reverse=True):
        expression = expression.replace(f"${{{name}}}", values[name]).replace(f"${name}", values[name])
    if "$" in expression:
        raise ValueError(f"a variable is left in: {expression}")
    return expression


def _variables(url: str, board: dict[str, Any], start: float, end: float, found: Findings, run: str) -> dict[str, str]:
    values = {"__rate_interval": "60s", "__interval": "15s", "__range": f"{int(end - start)}s"}
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        if match is None:
            found.bad.append(f"{board['uid']}: variable {variable['name']} is no label_values(…)")
            continue
        known = ask(url, f"label/{match[2]}/values", **{"match[]": fill_in(match[1], values)}, start=start, end=end)
        if not known:
            found.bad.append(f"{board['uid']}: variable {variable['name']} has no value")
        is_run = run and variable["name"] == "run"
        values[variable["name"]] = ".+" if variable["multi"] or not known else run if is_run else known[-1]
    return values


def _wrong(url: str, expression: str, start: float, end: float) -> str | None:
    step = max(math.ceil((end - start) / STEPS_MAX), 1)
    try:
        series = ask(url, "query_range", query=expression, start=start, end=end, step=step)["result"]
    except NotReady as error:
        return str(error)
    if not series:
        return "no series"
    return None if any(math.isfinite(float(v)) for s in series for _, v in s["values"]) else "no finite value"


def _rules() -> list[str]:
    files = sorted((DASHBOARDS / "prometheus" / "rules").glob("*.yml"))
    return [rule["expr"] for path in files for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def main() -> int:
    """Check and print."""
    parser = argparse.ArgumentParser(description="every query of the dashboards against a running Prometheus")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15.0, help="how far back to look")
    parser.add_argument("--may-be-empty", action="append", default=[], metavar="TITLE", help="further panels that may be empty")
    parser.add_argument("boards", nargs="*", type=Path, help="dashboards; all of this folder when left out")
    args = parser.parse_args()
    end = time.time()
    try:
        boards = args.boards or sorted((DASHBOARDS / "grafana").glob("*.json"))
        found = check(args.prometheus, boards, end - 60 * args.minutes, end, MAY_BE_EMPTY | set(args.may_be_empty))
    except (NotReady, OSError) as error:
        print(f"check_data: {args.prometheus}: {error}", file=sys.stderr)
        return 2
    for title, lines in (("EMPTY OR REFUSED", found.bad), ("empty, as it may be", found.empty), ("on no panel", found.unused)):
        print("\n".join(f"{title}: {line}" for line in lines))
    print(f"check_data: {found.queries} queries, {len(found.bad)} bad, {len(found.empty)} empty, {len(found.unused)} unused")
    return 1 if found.bad else 0


if __name__ == "__main__":
    sys.exit(main())
