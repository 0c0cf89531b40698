"""Live progress of a run: a panel on a terminal, plain lines elsewhere.

Owns presentation only; every number comes from ``run_status`` and ``step_metrics``. A thread polls, so a slow ledger never
holds up the supervisor.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollbook.core.config import Config
from rollbook.core.errors import RollbookError
from rollbook.rpc.client import LedgerClient

POLL_S = 0.5


def step_line(metrics: dict, steps_total: int) -> str:
    """One finished step in one line."""

    def number(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    return (
        f"step {metrics['step']:4d}/{steps_total}  reward {number('reward_mean', '.3f')}  "
        f"entropy {number('entropy_mean', '.3f')}  ESS {number('ess_token_raw_fraction', '.3f')}  "
        f"lag {number('lag_head_mean', '.2f')}  KL {number('kl_behaviour_old_k3', '.1e')}  "
        f"grad {number('grad_norm', '.2f')}  lr {number('lr', '.1e')}"
    )


def status_lines(state: dict, config: Config) -> list[str]:
    """What runs, rates, lag and failures as text."""
    steps, slots, rates = state["steps"], state["slots"], state["rates"]
    left = config.run.steps - steps["trained"]
    last = state.get("last_step")
    lines = [
        f"run {state['run_id']}  step {steps['trained']}/{config.run.steps}  planned {steps['planned']}  "
        f"version {(state['head'] or {}).get('version', '-')}  checkpoint {steps['checkpoint']}",
        "slots  " + "  ".join(f"{name} {n}" for name, n in slots.items()),
        f"rates  {rates['samples_per_s']:.1f} rollouts/s  {rates['tokens_per_s']:.0f} tokens/s"
        + (f"  ETA {_eta(rates, left, config)}" if left > 0 else ""),
        "submits  " + "  ".join(f"{name} {n}" for name, n in state["submits"].items()),
    ]
    for name in ("verdicts", "failures"):
        if state[name]:
            lines.append(f"{name}  " + "  ".join(f"{reason} {n}" for reason, n in state[name].items()))
    for worker in state["workers"]:
        lines.append(
            f"worker {worker['incarnation'][:8]} {worker['engine']:<12} version {worker['version']}  leases {worker['leases']}  "
            f"last beat {worker['beat_age_s']:.1f} s ago"
        )
    for role in state["roles"]:
        lines.append(f"role {role['role']:<8} epoch {role['epoch']}  term ends in {role['expires_in_s']:.1f} s")
    if last:
        lines.append(step_line(last, config.run.steps))
    return lines


def _eta(rates: dict, steps_left: int, config: Config) -> str:
    per_step = config.learner.groups_per_step * config.learner.group_size
    if rates["samples_per_s"] <= 0:
        return "-"
    seconds = steps_left * per_step / rates["samples_per_s"]
    return f"{seconds / 60:.1f} min" if seconds > 90 else f"{seconds:.0f} s"


class Progress:
    """Shows a run while it runs; use as a context manager."""

    def __init__(self, make_client: Callable[[], LedgerClient], config: Config, plain: bool = False) -> None:
        self._make_client, self._config = make_client, config
        self._console = Console()
        self._plain = plain or not sys.stdout.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)
        self._live = None if self._plain else Live(Text("starting"), console=self._console, refresh_per_second=4)
        self._shown_step = 0
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        if self._live:
            self._live.stop()

    def event(self, text: str) -> None:
        """Print a supervisor event above the progress."""
        self._console.print(f"[{time.monotonic() - self._began:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def _poll(self) -> None:
        client = self._make_client()
        while not self._stop.wait(POLL_S):
            try:
                self._show(client)
            except RollbookError:
                continue  # the ledger is starting or restarting; the next poll asks again
        try:
            self._show(client)
        except RollbookError:
            pass  # the ledger has stopped already; the report shows the rest
        client.close()

    def _show(self, client: LedgerClient) -> None:
        state = client.run_status()
        if self._live:
            self._live.update(Text("\n".join(status_lines(state, self._config))))
            return
        for metrics in client.step_metrics(state["lineage"], self._shown_step + 1):
            self._shown_step = metrics["step"]
            rates = state["rates"]
            line = step_line(metrics, self._config.run.steps)
            self.event(f"{line}  {rates['samples_per_s']:.1f} rollouts/s  {rates['tokens_per_s']:.0f} tok/s")
