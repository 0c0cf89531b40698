"""A ledger server among several of one run: it listens, waits for its turn, takes the fence, and serves like any other.

Owns the wait of a standby and the files by which the servers of a run are found. Never displaces a holder whose term lasts:
the fence row decides (PostgreSQL), or the lock of the file (SQLite, one machine). A holder that was stopped inside a
transaction keeps its row locked no longer than the database's idle-in-transaction timeout, which is below the term (R12);
a SQLite holder that is merely stopped keeps the lock until somebody kills it, as the supervisor does. Upholds P8 and P9.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from rollbook.cli.preflight import check_run_dir
from rollbook.cli.serving import STOP_GRACE_S, Patience, hold_role, open_ledger, open_run
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, LedgerLocked, RoleHeld, Unavailable
from rollbook.core.host import host, superseded
from rollbook.core.records import RunRecord
from rollbook.ledger.ledger import Ledger
from rollbook.observe import progress
from rollbook.observe.failpoints import failpoint
from rollbook.rpc.address import announce, announced, forget, write_address
from rollbook.rpc.server import RunningServer, serve
from rollbook.rpc.standby import StandbyPort

POLL_S = 0.4
"""A standby looks at the fence at least this often; it takes the place of a holder that let go within about that time."""
LOGGED_EVERY_S = 60.0

log = logging.getLogger(__name__)


def server_index(config: Config, index: int, standby: bool) -> int | None:
    """Which of the run's servers a process is; None for the only one of a run without standbys. Raises ConfigError."""
    several = bool(config.ledger.standbys or config.ledger.addresses)
    if standby and index == 0:
        index = 1
    if index < 0 or (config.ledger.addresses and index >= len(config.ledger.addresses)):
        raise ConfigError(f"--index {index}: ledger.addresses lists the servers 0 to {len(config.ledger.addresses) - 1}")
    return index if several or index else None


def serve_in_turn(
    config: Config, record: RunRecord, stop: threading.Event, *, index: int, accept: Collection[str] = (),
    serve: Callable[..., RunningServer] = serve,
) -> None:  # fmt: skip
    """Serve the run once the role is free, until ``stop`` is set; before that every verb is answered with Standby.

    The server with index 0 also opens a run that is new; the others wait until somebody has. The wait has no bound but
    ``stop``. Raises as ``serve_ledger``.
    """
    check_run_dir(config)
    run_dir, fixed = config.run.dir, config.ledger.addresses
    port = StandbyPort()
    server = serve(
        port, fixed[index] if fixed else config.ledger.address, run_id=config.run.id, on_fenced=stop.set, security=config.security
    )
    server.shows_serving(False)
    address = fixed[index] if fixed else server.address

    def others() -> list[str]:
        return [*fixed, *(a for _, a in sorted(announced(run_dir).items()))]

    def stay_found() -> None:
        try:
            write_address(run_dir, address, others())
        except OSError as error:  # who has found this server does not need the file
            log.warning("the address file was not written: %s", error, extra={"event": "address_unwritten"})

    turn = _Turn(config, stop, opens=index == 0)
    try:
        announce(run_dir, index, address)
        ledger = turn.wait(lambda ledger: open_run(config, record, ledger, accept, Patience(0.0, stop)))
        if ledger is None:
            return
        failpoint("ledger.standby.before_answers")
        port.promote(cast(Any, ledger))
        server.shows_serving(True)
        failpoint("ledger.start.before_address")
        write_address(run_dir, address, others())
        failpoint("ledger.start.after_address")
        log.info("serving", extra={"address": address, "run": config.run.id, "config": record.config_digest[:12], "index": index})
        hold_role(config, ledger, server, stop, stay_found, index)
    finally:
        forget(run_dir, index, address)
        server.stop(STOP_GRACE_S)
        turn.close()


class _Turn:
    """Waiting for the role of a run's server."""

    def __init__(self, config: Config, stop: threading.Event, *, opens: bool) -> None:
        self._config, self._stop, self._opens = config, stop, opens
        url = config.ledger.url
        self._file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite") else None
        self._ledger: Ledger | None = None
        self._revision: str | None = None
        self._logged_at = float("-inf")

    def wait(self, take: Callable[[Ledger], None]) -> Ledger | None:
        """The ledger once ``take`` has taken the role with it; None when told to stop before. Raises what ``take`` raises.

        A database that does not answer is asked again like a role that is held, but one that never did within two terms is an
        error of the server that opens the run: nobody else would name it.
        """
        silent_until = host().monotonic() + 2 * self._config.ledger.role_ttl_s + 2
        looked = not self._opens
        while True:
            try:
                wait_s = self._time_left()
                looked = True
                if wait_s <= 0:
                    if self._ledger is not None and self._ledger.schema_revision() != self._revision:
                        self.close()  # opening it again says whether this package can still serve it
                    failpoint("ledger.standby.before_fence")
                    take(self._opened())
                    return self._opened()
            except (RoleHeld, LedgerLocked, Unavailable) as error:
                if not looked and isinstance(error, Unavailable) and host().monotonic() > silent_until:
                    raise
                wait_s = POLL_S
                self._say(str(error))
                self.close()
            progress.mark(progress.State.WAITING)
            if self._excludes:
                self.close()
            if self._stop.wait(min(wait_s, POLL_S)):
                return None

    @property
    def _excludes(self) -> bool:
        """Whether this server keeps every other one out by having the database open."""
        return self._ledger is not None and self._ledger.exclusive

    def close(self) -> None:
        """Let the database go; a role that is held is released."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()

    def _opened(self) -> Ledger:
        if self._ledger is None:
            self._ledger = open_ledger(self._config)
            self._revision = self._ledger.schema_revision()
        return self._ledger

    def _time_left(self) -> float:
        """Seconds after which the role may be free; 0 when it is worth trying to take it."""
        unopened = 0.0 if self._opens else POLL_S
        if self._file is not None and not self._file.exists():
            return unopened
        term = self._opened().server_term(self._config.run.id)
        if term is None:
            self._say("no server has opened the run yet")
            return unopened
        if self._excludes or term[0] == superseded():
            return 0.0
        self._say(f"{term[0]} holds the role")
        return term[1]

    def _say(self, why: str) -> None:
        if host().monotonic() - self._logged_at >= LOGGED_EVERY_S:
            self._logged_at = host().monotonic()
            log.info("standby: %s", why, extra={"event": "standby_waits"})
