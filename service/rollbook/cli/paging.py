"""The status page beside a ledger server: opened with the role, named in the run directory, closed with it.

Owns that order and the file ``status.address``. A page that cannot be opened costs the page and not the run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError
from rollbook.observe import failures

if TYPE_CHECKING:
    from rollbook.ledger.ledger import Ledger
    from rollbook.report.statuspage import StatusPage

FILE_NAME = "status.address"

log = logging.getLogger(__name__)


@contextmanager
def status_page(config: Config, ledger: Ledger) -> Iterator[None]:
    """Show the run at ``ledger.status_address`` for the length of the block; nothing when that is empty."""
    if not config.ledger.status_address:
        yield
        return
    file = Path(config.run.dir) / FILE_NAME
    try:
        page = _open(config, ledger, _read(file))
    except ConfigError as error:
        log.error("no status page is shown: %s", error, extra={"event": "status_unserved"})
        yield
        return
    try:
        log.info("status page", extra={"event": "status_served", "url": page.url})
        _write(file, f"{page.url}\n")
        yield
    finally:
        page.close()
        if _read(file) == page.url:  # another server may have taken over and written its own
            file.unlink(missing_ok=True)


def _open(config: Config, ledger: Ledger, last_url: str) -> StatusPage:
    """The page; where any port will do, at the last one if that is free, so that a browser finds the server's successor."""
    from rollbook.report.statuspage import Content, StatusPage  # only the server needs it

    address = config.ledger.status_address
    content = Content(ledger, lambda: failures.read(config.run.dir))
    last_port = last_url.rstrip("/").rpartition(":")[2]
    if address.endswith(":0") and last_port.isdigit():
        with suppress(ConfigError):
            again = f"{address.rpartition(':')[0]}:{last_port}"
            return StatusPage(again, content, run_id=config.run.id, security=config.security)
    return StatusPage(address, content, run_id=config.run.id, security=config.security)


def page_url(run_dir: str | Path) -> str:
    """Where a run's status page was said to be; empty when nobody has said so."""
    return _read(Path(run_dir) / FILE_NAME)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _write(file: Path, text: str) -> None:
    temporary = file.with_suffix(".address.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    except OSError as error:  # who knows the port does not need the file
        log.warning("%s was not written: %s", file, error, extra={"event": "status_unnamed"})
