"""What the notes (Grafana's annotations) of a dashboard say over a span of time, and marks that somebody else wrote down.

Owns how values become notes: as in Grafana, values at neighbouring steps are one note with a length. Never draws.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from check_data import fill_in
from prometheus_server import ask

MARK = "#f1f3f5"


def happened(
    url: str, notes: Iterable[Mapping[str, str]], values: Mapping[str, str], span: tuple[float, float], step: int
) -> list[dict[str, Any]]:
    """{name, text, colour, at, until} of every note within the span, in order of time. Raises NotReady for a refused query."""
    start, end = span
    found = []
    for note in notes:
        for series in ask(url, "query_range", query=fill_in(note["expr"], values), start=start, end=end, step=step)["result"]:
            text = re.sub(r"{{(\w+)}}", lambda label, metric=series["metric"]: str(metric.get(label[1], "")), note["text"])
            for at, until in _regions([float(moment) for moment, _ in series["values"]], step):
                found.append({"name": note["name"], "text": text, "colour": note["colour"], "at": at, "until": until})
    return sorted(found, key=lambda one: (one["at"], one["name"]))


def marks(path: Path) -> list[dict[str, Any]]:
    """Notes of a file with one ``{"at": SECONDS, "text": …}`` a line: what was done to the run. Raises ValueError."""
    made = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            at, text = (json.loads(line)[key] for key in ("at", "text"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not {{at, text}}: {error!r}") from None
        made.append({"name": "Injected", "text": str(text), "colour": MARK, "at": float(at), "until": float(at), "isMark": True})
    return made


def _regions(moments: list[float], step: float) -> list[tuple[float, float]]:
    made: list[tuple[float, float]] = []
    for moment in moments:
        if made and moment - made[-1][1] <= 1.5 * step:
            made[-1] = (made[-1][0], moment)
        else:
            made.append((moment, moment))
    return made
