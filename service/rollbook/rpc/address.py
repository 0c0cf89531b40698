"""Where the ledger server listens: one line in ``ledger.address`` of the run directory.

Owns writing it atomically and reading it again on every reconnect, since a restarted server may have another port. Never
decides whether the server behind it is alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rollbook.core.errors import Unavailable

FILE_NAME = "ledger.address"


def write_address(run_dir: str | Path, address: str) -> Path:
    """Replace the run's address file, so that a reader sees the old or the new address and nothing else."""
    path = Path(run_dir) / FILE_NAME
    temporary = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
    temporary.write_text(address + "\n")
    os.replace(temporary, path)
    return path


def address_in(run_dir: str | Path) -> Callable[[], str]:
    """Provider for ``LedgerClient`` that reads the address file each time. The provider raises Unavailable while it is absent."""
    path = Path(run_dir) / FILE_NAME

    def read() -> str:
        try:
            address = path.read_text().strip()
        except OSError as error:
            raise Unavailable(f"no ledger address in {path} ({error.strerror}); is `rollbook ledger` running?") from error
        if not address:
            raise Unavailable(f"{path} is empty; restart `rollbook ledger`")
        return address

    return read
