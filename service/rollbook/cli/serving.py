"""The ledger server's life: open the database, take the fence, serve, keep the term, let go.

Owns that order, the patience with a dying predecessor and the files by which the run directory names its configuration.
Never answers a call itself (``rpc``) and never writes SQL (``ledger``). Upholds P8: past its term the server ends.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from rollbook.cli.paging import status_page
from rollbook.cli.preflight import check_run_dir, check_still_recorded
from rollbook.cli.showing import shown_ledger
from rollbook.cli.standing import RunWatch
from rollbook.core.changes import differences
from rollbook.core.config import Config
from rollbook.core.errors import Fenced, LedgerLocked, RoleHeld, ServerFenced, Unavailable
from rollbook.core.host import fsync_directory, host, incarnation, superseded
from rollbook.core.records import RunRecord
from rollbook.learner.history import Stray, move_aside, refuse_when_ahead
from rollbook.ledger.ledger import Ledger
from rollbook.observe import progress
from rollbook.observe.failpoints import failpoint
from rollbook.rpc.address import write_address
from rollbook.rpc.server import RunningServer, serve

T = TypeVar("T")
STOP_GRACE_S = 2.0
"""How long calls in flight may take when the ledger server stops; an unanswered one is repeated with the same key."""

log = logging.getLogger(__name__)


def serve_ledger(
    config: Config, record: RunRecord, stop: threading.Event, *, accept: Collection[str] = (),
    serve: Callable[..., RunningServer] = serve,
) -> None:  # fmt: skip
    """Serve the run until ``stop`` is set.

    Raises: Fenced (another server took over), RoleHeld, LedgerLocked, Unavailable (not opened in time), ConfigMismatch,
    LedgerBehind (the run directory holds a newer history).
    """
    check_run_dir(config)
    patience = Patience(2 * config.ledger.role_ttl_s + 2, stop)
    ledger = patience.repeat(lambda: open_ledger(config))
    try:
        open_run(config, record, ledger, accept, patience)
        server = serve(ledger, config.ledger.address, run_id=config.run.id, on_fenced=stop.set, security=config.security)
        failpoint("ledger.start.before_address")
        file = write_address(config.run.dir, server.address)
        failpoint("ledger.start.after_address")
        log.info("serving", extra={"address": server.address, "run": config.run.id, "config": record.config_digest[:12]})
        try:
            hold_role(config, ledger, server, stop)
            file.unlink(missing_ok=True)
        finally:
            server.stop(STOP_GRACE_S)
    finally:
        ledger.close()


def open_run(config: Config, record: RunRecord, ledger: Ledger, accept: Collection[str], patience: Patience) -> None:
    """Take the server's role, check the run against its directory, open it and write its files. Raises as ``serve_ledger``."""
    recorded = ledger.run_ids()
    check_still_recorded(config, recorded)
    if config.run.id in recorded:  # before anything is written, the feeder and workers of the run included
        patience.repeat(lambda: ledger.attach(config.run.id))
        refuse_when_ahead(Path(config.run.dir), ledger)
    write_run_files(config, patience.repeat(lambda: ledger.open_run(record, accept=accept)))


def hold_role(
    config: Config, ledger: Ledger, server: RunningServer, stop: threading.Event, renewed: Callable[[], object] = lambda: None,
    index: int = 0,
) -> None:  # fmt: skip
    """Keep the term of a server that answers until ``stop`` is set; ``renewed`` is called after each renewal.

    ``index``: which ledger server of the configuration it is.

    Raises Fenced when another server has taken the role over.
    """
    with shown_ledger(config, ledger, index), status_page(config, ledger):
        _keep_term(ledger, config.ledger.role_ttl_s / 3, stop, RunWatch(config, ledger), renewed)
    if server.fenced:
        raise Fenced("another ledger server took over; this one has stopped answering")


def _keep_term(
    ledger: Ledger, every_s: float, stop: threading.Event, run: RunWatch, renewed: Callable[[], object]
) -> None:  # fmt: skip
    """Renew the server's own term until told to stop; a database that cannot answer now is asked again.

    Meanwhile the server answers its callers that the ledger is unavailable, and past its term nothing (R12).
    Raises ServerFenced.
    """
    while not stop.wait(every_s):
        try:
            ledger.renew_self()
        except ServerFenced:
            raise
        except Unavailable as error:
            log.warning("the server's term was not renewed: %s", error, extra={"event": "renewal_failed"})
        else:
            renewed()
        run.look()


class Patience:
    """Waiting for a dying predecessor to let go, or for the database to answer: bounded, and less when told to stop."""

    def __init__(self, bound_s: float, stop: threading.Event) -> None:
        self._deadline = host().monotonic() + bound_s
        self._stop = stop

    def repeat(self, attempt: Callable[[], T]) -> T:
        """The attempt's result; its last error when the time is over."""
        while True:
            progress.mark()
            try:
                return attempt()
            except (RoleHeld, LedgerLocked, Unavailable):
                if host().monotonic() > self._deadline or self._stop.wait(0.2):
                    raise


def open_ledger(config: Config) -> Ledger:
    """The run's database, before any role is taken. Raises as ``Ledger``."""
    return Ledger(
        config.ledger.url, holder=incarnation(), supersede=superseded(), role_ttl_s=config.ledger.role_ttl_s,
        group_commit_max=config.ledger.group_commit_max, ordinals_per_partition=config.ledger.ordinals_per_partition,
        payload_bytes_max=config.ledger.payload_bytes_max, password_file=config.ledger.password_file,
        retention=config.retention,
    )  # fmt: skip


def write_run_files(config: Config, opened: RunRecord) -> None:
    """Leave the resolved configuration in the run directory, so that the directory alone names the run.

    With it the places of today: what ``config`` may differ in from the opened record is where files and the database are now.

    Its revision gets a file of its own before the first step can be planned under it: a plan that is replayed after the
    configuration has changed is trained under what it was planned for (R15).
    """
    directory = Path(config.run.dir)
    content = json.loads(opened.config_json)
    today = content | {"config": json.loads(config.to_json())}
    _replace(directory / "config.json", json.dumps(today, indent=1, sort_keys=True))
    failpoint("ledger.files.before_revision")
    (directory / "revisions").mkdir(exist_ok=True)
    fsync_directory(directory)
    revision = directory / "revisions" / f"{opened.revision}.json"
    configuration = json.dumps(content["config"], sort_keys=True)
    if revision.exists() and differences(revision.read_text(), configuration):  # of a history this ledger has lost
        log.error("set aside revision %d of another history", opened.revision, extra={"event": "revision_set_aside"})
        move_aside(Stray(revision, -1, ""))
    if revision.exists():
        fsync_directory(revision.parent)  # whoever gave it its name may have died before flushing that name
    else:
        _replace(revision, configuration)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{host().token()[:8]}.tmp")
    try:
        with temporary.open("w") as file:
            host().writing(temporary)
            file.write(text)
            file.flush()
            host().fsync(file.fileno(), temporary)
        failpoint("ledger.files.before_rename")
        temporary.rename(path)
        failpoint("ledger.files.after_rename")
        fsync_directory(path.parent)  # a revision that vanished with the power would be taken for today's configuration
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
