"""What was seen of each fault: kept as JSON, and as a page for people. Owns both files; every line in them was on a screen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drills.eight import EIGHT

CHAOS = Path(__file__).resolve().parents[1]
RESULTS, TABLE = CHAOS / "results" / "seen.json", CHAOS / "SEEN.md"
LINE_MAX = 220

_HEAD = """# What the screens say

Eight faults in a real run of the tiny model with a tool (`python chaos/seen.py --fault each --record`): what `rollbook status`,
the status page and a real Prometheus said of each, word for word, and the first step of the alert's runbook. The rules ran
{factor:g} times as fast as in operation (`dashboards/src/scaled_rules.py`), so the times of alerts are short in proportion.
Written by `python chaos/seen.py --table` from `results/seen.json`.

"""


def keep(rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace what is known of these faults, and write the page."""
    known = {row["fault"]: row for row in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])}
    known |= {row["fault"]: row for row in rows}
    order = [fault.name for fault in EIGHT if fault.name in known]
    RESULTS.write_text(json.dumps([known[name] for name in order], indent=1) + "\n")
    TABLE.write_text(table([known[name] for name in order]))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    lines = ["| fault | told by status / page after | alerts, after | quiet after | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        after = " / ".join(f"{row[screen]['after_s']:.0f} s" if row[screen] else "never" for screen in ("status", "page"))
        fired = ", ".join(f"{name} ({one['severity']}) {one['after_s']:.0f} s" for name, one in row["alerts"].items())
        quiet = "never" if row["quiet_after_s"] is None else f"{row['quiet_after_s']:.0f} s"
        verdict = "told" if not row["findings"] else f"**{len(row['findings'])} findings**"
        lines.append(f"| {row['fault']} | {after} | {fired or '—'} | {quiet} | {verdict} |")
    parts = [_HEAD.format(factor=rows[0]["run"]["factor"]), "\n".join(lines), "\n"]
    for row in rows:
        parts += ["\n", *_section(row)]
    return "".join(parts)


def _section(row: Mapping[str, Any]) -> Iterable[str]:
    run = row["run"]
    title, how = (row[name][0].upper() + row[name][1:] for name in ("fault", "how"))
    yield f"## {title}\n\n{how}. {run['date']}, {run['commit'][:7]}.\n\n"
    for screen, title in (("status", "`rollbook status`"), ("page", "Status page")):
        if row[screen]:
            said = "\n".join(_cut(line) for line in row[screen]["lines"])
            yield f"{title}, {row[screen]['after_s']:.0f} s after the fault:\n\n```\n{said}\n```\n\n"
        else:
            yield f"{title}: did not tell.\n\n"
    for name, one in row["alerts"].items():
        mark = "" if name in row["expected"]["alerts"] else ", beside it"
        yield f"- **{name}** ({one['severity']}{mark}) after {one['after_s']:.0f} s: {one['summary']}\n"
    for name, step in row["runbook"].items():
        yield f"- Runbook of {name}, first step: {step}\n"
    for finding in row["findings"]:
        yield f"- NOT AS IT SHOULD BE: {_cut(finding)}\n"


def _cut(line: str) -> str:
    return line if len(line) <= LINE_MAX else f"{line[: LINE_MAX - 1]}…"
