"""Live progress of a run: a panel on a terminal, plain lines elsewhere.

Owns presentation only; every number comes from ``run_status`` and ``step_metrics``. A thread polls, so a slow ledger never
holds up the supervisor, and it polls less often where an answer takes long.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.core.records import ResumePoint
from rollbook.learner.interval import interval_sentence
from rollbook.rpc.client import LedgerClient

POLL_S = 0.5
POLL_SHARE = 0.1
"""Largest share of the ledger's time that looking may take."""
FLUSH_S = 5.0
REASONS_SHOWN = 5
"""Reasons of failures that get a line each."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def step_line(metrics: dict, steps_total: int) -> str:
    """One finished step in one line."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    head = f"step {metrics['step']:4d}/{steps_total}  "
    if metrics.get("outcome") == "skipped":
        return f"{head}skipped: {metrics.get('reason', '')}"
    return head + (
        f"reward {number('reward_mean', '.3f')}  "
        f"entropy {number('entropy_mean', '.3f')}  ESS {number('ess_token_raw_fraction', '.3f')}  "
        f"lag {number('lag_head_mean', '.2f')}  KL {number('kl_behaviour_old_k3', '.1e')}  "
        f"grad {number('grad_norm', '.2f')}  lr {number('lr', '.1e')}"
    )


def shown_url(url: str) -> str:
    """A database URL without its password."""
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url))


def on_terminal(text: str) -> str:
    """The text with every control character written out: a reason may hold what a model wrote, and a terminal obeys."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def status_lines(state: dict, config: Config) -> list[str]:
    """What runs, rates, lag and failures as text."""
    return [on_terminal(line) for line in _status_lines(state, config)]


def _status_lines(state: dict, config: Config) -> list[str]:
    steps, rates = state["steps"], state["rates"]
    total = steps["configured"] or config.run.steps
    finished = steps["trained"] + steps["skipped"]
    lines = [
        f"run {state['run_id']}  step {finished}/{total}"
        + (f" ({steps['skipped']} skipped)" if steps["skipped"] else "")
        + f"  planned {steps['planned']}  version {(state['head'] or {}).get('version', '-')}  checkpoint {steps['checkpoint']}",
        "slots  " + _counts(state["slots"]),
        "groups  " + _counts(state["groups"]),
        f"rates  {rates['samples_per_s']:.1f} rollouts/s  {rates['tokens_per_s']:.0f} tokens/s"
        + (f"  ETA {_eta(rates, total - finished, config)}" if finished < total else "  complete"),
        "submits  " + _counts(state["submits"]),
        "verdicts  " + (_counts(state["verdicts"]) or "none"),
        *_failure_lines(state["failures"]),
    ]
    lines += [f"quarantined  group {taken['ordinal']}: {taken['reason']}" for taken in state.get("quarantines", ())]
    if (gone := state.get("retention", {})).get("groups"):
        lines.append(
            f"retention  {gone['groups']} groups let go  low watermark {gone['low_watermark']}  replayable from step "
            f"{gone['replayable_from']}"
        )
    lines += [_fork_line(fork) for fork in state.get("forks", [])]
    if state.get("paused"):
        lines.append(f"PAUSED  {state['paused']}")
    if state["draining"]:
        lines.append("DRAINING  workers stop leasing until the ledger server restarts")
    for worker in state["workers"]:
        lines.append(
            f"worker {worker['incarnation'][:8]} {worker['engine']:<12} version {worker['version']}  leases {worker['leases']}  "
            f"last beat {worker['beat_age_s']:.1f} s ago"
        )
    for role in state["roles"]:
        left_s = role["expires_in_s"]
        held = f"held by {role['holder'][:8]} for another {left_s:.1f} s" if left_s > 0 else f"not held since {_age(-left_s)}"
        lines.append(f"role {role['role']:<8} epoch {role['epoch']}  {held}")
    if last := state.get("last_step"):
        lines.append(step_line(last, total))
        if said := interval_sentence(last):
            lines.append(f"checkpoints  {said}")
    return lines


def _failure_lines(failures: dict) -> list[str]:
    if not failures:
        return ["failures  none"]
    found = sorted(failures.items(), key=lambda item: -item[1])
    lines = [f"failures  {sum(failures.values())} attempts without a sample"]
    lines += [f"  {n:6}  {reason}" for reason, n in found[:REASONS_SHOWN]]
    if rest := found[REASONS_SHOWN:]:
        lines.append(f"  {sum(n for _, n in rest):6}  with {len(rest)} other reasons")
    return lines


def _fork_line(fork: dict) -> str:
    difference = "unknown" if fork["difference"] is None else f"{fork['difference']:.3g}"
    return (
        f"lineage {fork['number']}  forked from {fork['parent']} at step {fork['fork_step']}: replayed weights differed by "
        f"{difference}, tolerance {fork['tolerance']:g}; orphans kept {fork['orphans_kept']}, dropped {fork['orphans_dropped']}"
    )


def _counts(table: dict) -> str:
    return "  ".join(f"{name} {n}" for name, n in table.items())


def _age(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds > 90 else f"{seconds:.0f} s"


def _eta(rates: dict, steps_left: int, config: Config) -> str:
    per_step = config.learner.groups_per_step * config.learner.group_size
    return _age(steps_left * per_step / rates["samples_per_s"]) if rates["samples_per_s"] > 0 else "-"


def resume_line(point: ResumePoint, steps: int) -> str:
    """Where a run goes on, in one line."""
    if point.head is None or not point.checkpoints:
        return "a new run: nothing is recorded yet"
    newest = point.checkpoints[0].step
    if newest >= steps:
        return f"complete: all {steps} steps are made and checkpointed"
    replayed = point.last_planned_step - newest
    return (
        f"resuming from the checkpoint of step {newest} of {steps} (version {point.head.version} is published)"
        + (f"; steps {newest + 1} to {point.last_planned_step} are trained from stored plans" if replayed > 0 else "")
    )  # fmt: skip


class Progress:
    """Shows a run while it runs; use as a context manager."""

    def __init__(self, make_client: Callable[[], LedgerClient], config: Config, plain: bool = False) -> None:
        self._make_client, self._config = make_client, config
        self._console = Console()
        self._plain = plain or not sys.stdout.isatty()
        self._stop = threading.Event()
        self._look = threading.Event()
        self._flushed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)
        self._live = None if self._plain else Live(Text("starting"), console=self._console, refresh_per_second=4)
        self._shown_step: int | None = None
        """Newest step that needs no line any more; None until the run is open."""
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._look.set()
        self._thread.join(5.0)
        if self._live:
            self._live.stop()

    def opened(self, point: ResumePoint) -> None:
        """Say where the run stands; only steps finished from now on are shown."""
        self.event(resume_line(point, self._config.run.steps))
        self._shown_step = point.head.version if point.head else 0

    def flush(self) -> None:
        """Show what is known now; called while the ledger server still answers, and bounded."""
        self._flushed.clear()
        self._look.set()
        if self._thread.is_alive():
            self._flushed.wait(FLUSH_S)

    def event(self, text: str) -> None:
        """Print a supervisor event above the progress. A reader that has gone away does not end the run."""
        stamped = f"[{time.monotonic() - self._began:6.1f} s] {on_terminal(text)}"
        try:
            self._console.print(stamped, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            pass  # stdout is closed: there is nobody to tell

    def _poll(self) -> None:
        client = self._make_client()
        took_s = 0.0
        while not self._stop.is_set():
            flushing = self._look.wait(max(POLL_S, took_s / POLL_SHARE))
            self._look.clear()
            began = time.monotonic()
            try:
                self._show(client)
            except RollbookError:
                pass  # the ledger is starting, restarting or gone; the next poll asks again
            except Exception as error:  # noqa: BLE001 - boundary of the thread: a line that fails must not end the others
                self.event(f"progress: {error!r}")
            took_s = time.monotonic() - began
            if flushing:
                self._flushed.set()
        client.close()

    def _show(self, client: LedgerClient) -> None:
        if self._shown_step is None:
            return
        state = client.run_status()
        total = state["steps"]["configured"] or self._config.run.steps
        if self._live:
            self._live.update(Text("\n".join(status_lines(state, self._config))))
            return
        for metrics in client.step_metrics(state["lineage"], self._shown_step + 1):
            self._shown_step = metrics["step"]
            rates = state["rates"]
            line = step_line(metrics, total)
            self.event(f"{line}  {rates['samples_per_s']:.1f} rollouts/s  {rates['tokens_per_s']:.0f} tok/s")
