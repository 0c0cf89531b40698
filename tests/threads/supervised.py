"""The real local supervisor over roles that are a line of shell each, with a real ledger server for it to ask.

``launch`` is the supervisor's own way to start a role; only which program is started differs from a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rollbook.core.config import Config
from rollbook.core.records import RunRecord
from rollbook.ledger.ledger import Ledger
from rollbook.rpc.address import write_address
from rollbook.rpc.server import serve
from rollbook.supervise.local import LocalSupervisor
from rollbook.supervise.process import Handle, ProcessRecord, spawn
from task_fixtures import make_config

BOUND_S = 60.0
"""Longest that anything here may take; under a defect the run is told to stop then."""
SLEEP = "exec sleep 600"


class Supervised:
    """One supervisor; ``scripts`` by role name, what is not named sleeps."""

    def __init__(self, run_dir: Path, url: str, scripts: Mapping[str, str], **supervisor: Any) -> None:
        self.dir = run_dir
        limits = {"backoff_s": 0.0, "drain_s": 1.0} | supervisor
        self.config: Config = make_config(
            run={"dir": str(run_dir), "chaos_allowed": True}, ledger={"url": url, "role_ttl_s": 3.0}, supervisor=limits
        )
        self.events: list[str] = []
        self.on_event: Callable[[str], None] = lambda text: None
        self._scripts = {"ledger": SLEEP, "feeder": SLEEP, "learner": SLEEP, "worker": SLEEP} | dict(scripts)
        self.address = ""
        self.supervisor = LocalSupervisor(self.config, ["unused.toml"], self._event, launch=self._launch)

    def _event(self, text: str) -> None:
        self.events.append(text)
        self.on_event(text)

    def _launch(
        self, argv: Sequence[str], env: Mapping[str, str], out: IO[bytes], known: Callable[[int], None]
    ) -> Handle:
        role = argv[3]
        if role == "ledger" and self.address:
            write_address(self.dir, self.address)
        return spawn(["sh", "-c", self._scripts[role]], env, out, known)

    def run(self) -> bool:
        """``LocalSupervisor.run``, told to stop when it takes too long."""
        timer = threading.Timer(BOUND_S, self.supervisor.request_stop)
        timer.start()
        try:
            return self.supervisor.run()
        finally:
            timer.cancel()

    def records(self) -> dict[str, ProcessRecord]:
        return self.supervisor.table.records()

    def left(self) -> list[int]:
        """Processes of the run that live."""
        return [pid for record in self.records().values() for pid in record.tree()]

    def end(self) -> None:
        for record in self.records().values():
            record.kill_tree()


@contextmanager
def supervised(run_dir: Path, url: str, scripts: Mapping[str, str], **limits: Any) -> Iterator[Supervised]:
    """A supervisor whose ledger server answers; everything it has started is ended with the block."""
    made = Supervised(run_dir, url, scripts, **limits)
    record = RunRecord(made.config.run.id, made.config.digest(), made.config.to_json(), 0, made.config.rules())
    with Ledger(url, holder="server", role_ttl_s=600.0) as ledger:
        ledger.open_run(record)
        server = serve(ledger, "127.0.0.1:0", run_id=made.config.run.id)
        made.address = server.address
        try:
            yield made
        finally:
            made.end()
            server.stop(0.0)
