"""What a person sees of a run: `rollbook status`, the status page, the alerts that fire in a real Prometheus, their runbooks.

Owns a Prometheus that scrapes the run by the ledger server's own list, and one reading of all screens. Never looks behind them,
at database or logs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drills.runs import REPOSITORY, Run
from rollbook.core.errors import RollbookError
from rollbook.observe import targets

DASHBOARDS = REPOSITORY / "dashboards"
sys.path.insert(0, str(DASHBOARDS / "src"))

import scaled_rules  # noqa: E402
from check_data import check  # noqa: E402
from prometheus_server import NotReady, ask, is_installed, prometheus, recorded_lines  # noqa: E402

__all__ = ["DASHBOARDS", "NotReady", "Screens", "Seen", "ask", "check", "first_step", "is_installed", "ledger_page",
           "recorded_lines", "scraped"]  # fmt: skip

LOOK_S = 10.0


@dataclass
class Seen:
    """All screens at one moment."""

    at: float
    """When the last of them had been read."""
    status: list[str] = field(default_factory=list)
    """What `rollbook status` says of how things stand: its first line, and every line of trouble."""
    page: list[str] = field(default_factory=list)
    """The sentence of the status page and its troubles."""
    alerts: dict[str, str] = field(default_factory=dict)
    """Alerts that fire, with their severities."""
    summaries: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def says(self, screen: str) -> str:
        return "\n".join(self.status if screen == "status" else self.page)


class Screens:
    """The screens of one run.

    Args:
        url: of the Prometheus that scrapes it.
    """

    def __init__(self, run: Run, url: str) -> None:
        self._run, self.url = run, url

    def look(self, status: bool = True) -> Seen:
        """Everything now; without ``status`` the command is left out, which takes seconds to start.

        Paths of the run directory are shortened to RUN, those of the checkout are relative to it.
        """
        seen = Seen(time.time())
        seen.page = self._page()
        with contextlib.suppress(NotReady, OSError):
            for alert in ask(self.url, "alerts")["alerts"]:
                if alert["state"] == "firing":
                    name = alert["labels"]["alertname"]
                    seen.alerts[name] = alert["labels"]["severity"]
                    seen.summaries[name] = alert["annotations"]["summary"]
        if status:
            code, told = self._run.command("status")
            lines = told.splitlines()
            first = [f"exit code {code}"] if code else []
            seen.status = first + lines[:1] + [line for line in lines[1:] if line.startswith(("TROUBLE", "PAUSED"))]
        seen.status, seen.page = ([self._shortened(line) for line in lines] for lines in (seen.status, seen.page))
        seen.at = time.time()
        return seen

    def _shortened(self, line: str) -> str:
        """Without where the run and the checkout lie, which says nothing to anybody else."""
        return line.replace(str(self._run.dir), "RUN").replace(f"{REPOSITORY}/", "")

    def _page(self) -> list[str]:
        place = self._run.dir / "status.address"
        try:
            with urllib.request.urlopen(f"{place.read_text().strip()}data", timeout=LOOK_S) as answer:
                shown = json.load(answer)
        except urllib.error.HTTPError as error:
            return [str(json.loads(error.read() or b"{}").get("error", error))]
        except (OSError, ValueError) as error:
            return [f"the page does not answer: {error}"]
        return [f"{shown['standing']['state']}: waits for {shown['standing']['waits_for']}", *shown["troubles"]]


def ledger_page(run: Run) -> str:
    """host:port of the ledger server's metrics; empty while there is none."""
    with contextlib.suppress(RollbookError, OSError):
        return next((t.address for t in targets.announced(run.dir) if t.role == "ledger"), "")
    return ""


@contextlib.contextmanager
def scraped(run: Run, folder: Path, factor: float, port: int) -> Iterator[str]:
    """A Prometheus on the run for the length of the block; gives its URL.

    Args:
        factor: how much faster than in operation the rules run.
        port: of the ledger server's page, which outlives its processes.
    """
    folder.mkdir(parents=True)
    written: Sequence[Path] = scaled_rules.write(folder, factor)
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in written],
        "scrape_configs": [
            {"job_name": "rollbook", "http_sd_configs": [{"url": f"http://127.0.0.1:{port}/sd", "refresh_interval": "1s"}]}
        ],
    }))  # fmt: skip
    with prometheus(config, folder / "data", runbooks=DASHBOARDS / "runbooks") as url:
        yield url


def first_step(alert: str) -> str:
    """The first thing that an alert's runbook says to do."""
    page = (DASHBOARDS / "runbooks" / f"{alert}.md").read_text()
    return page.partition("## What to do")[2].strip().splitlines()[0].removeprefix("1. ")
