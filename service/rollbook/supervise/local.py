"""Roles as processes of this machine.

Owns how they are started and ended here: a child process each, known by the durable table, with its predecessor and all that
had started dead before it begins (R12). The law of restarts is ``supervisor``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from rollbook.core.config import Config
from rollbook.supervise.backend import KILL_S, Needs, Node, Order, Placement, Running
from rollbook.supervise.guardian import Guardian
from rollbook.supervise.placements import devices
from rollbook.supervise.process import Launcher, ProcessRecord, ProcessTable, RoleProcess, spawn, start
from rollbook.supervise.supervisor import Supervisor


class LocalRole:
    """A role process of this machine as the supervisor handles it."""

    def __init__(self, process: RoleProcess, needs: Needs) -> None:
        self._process, self._needs = process, needs
        self._placement: Placement | None = None

    @property
    def record(self) -> ProcessRecord:
        """What identifies the process."""
        return self._process.record

    def exit_code(self) -> int | None:
        """See ``backend.Running``."""
        return self._process.exit_code()

    def cause(self) -> str:
        """The exit code says it all."""
        return ""

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the tree."""
        self._process.kill()

    def placement(self) -> Placement | None:
        """This machine."""
        if self._placement is None:
            gpus, driver = devices(None) if self._needs.gpus else ((), "")
            record, host = self.record, socket.gethostname()
            self._placement = Placement(
                record.name, record.incarnation, host, host, record.pid, record.start_time, gpus, driver
            )  # fmt: skip
        return self._placement

    def waiting_s(self) -> float:
        """A process has its place at once."""
        return 0.0

    def node_id(self) -> str:
        """This machine."""
        return socket.gethostname()

    def waits_for(self) -> str:
        """Nothing is reserved here."""
        return ""


class LocalBackend:
    """Starts roles as children of this process, which must start them from a thread that lives as long as it does."""

    def __init__(self, run_dir: Path, launch: Launcher = spawn) -> None:
        self._table_file = run_dir / "supervisor" / "processes.json"
        self._launch = launch
        self._guardian = Guardian(run_dir / "supervisor")
        self.table = ProcessTable(self._table_file)

    def open(self, emit: Callable[[str], None]) -> Mapping[str, Running]:
        """End processes of an earlier supervisor of this run that are still alive."""
        self._guardian.end_previous()
        self.table = ProcessTable(self._table_file)
        self._end_leftovers(emit)
        self._guardian.start()
        return {}

    def _end_leftovers(self, emit: Callable[[str], None]) -> None:
        for record in self.table.records().values():
            if left := record.tree():
                emit(f"ending {record.name} (pid {', '.join(map(str, left))}) left by an earlier supervisor")
                record.end(KILL_S)

    def start(self, order: Order) -> Running:
        """See ``backend.Backend``."""
        previous = self.table.records().get(order.name)
        if previous is not None:
            previous.end(KILL_S)
        process = start(order.name, order.argv, order.log, dict(order.env), self.table, self._launch)
        return LocalRole(process, order.needs)

    def nodes(self) -> list[Node]:
        """This machine."""
        return [Node(socket.gethostname(), socket.gethostname())]

    def room(self, needs: Needs) -> int:
        """Nothing is reserved here, so there is no account of what is left."""
        return 0

    def release(self, name: str) -> None:
        """See ``room``."""

    def keep(self, names: Collection[str]) -> None:
        """See ``room``."""

    def close(self) -> None:
        """The roles have ended: nobody has to watch over their left-overs."""
        self._guardian.stop()


class LocalSupervisor(Supervisor):
    """Runs every role of one configuration on this machine.

    Args:
        config_args: CONFIG and overrides as the role commands take them.
        on_event: told in one text what happened; from several threads.
        accept: names of changed fields, passed on to the ledger server.
        launch: how role processes are started.

    Raises: Unavailable (another supervisor has the run directory), ConfigError.
    """

    def __init__(
        self,
        config: Config,
        config_args: Sequence[str],
        on_event: Callable[[str], None] = print,
        accept: Sequence[str] = (),
        launch: Launcher = spawn,
    ) -> None:
        self._local = LocalBackend(Path(config.run.dir), launch)
        super().__init__(config, config_args, self._local, on_event, accept)

    @property
    def table(self) -> ProcessTable:
        """The newest process of every role."""
        return self._local.table
