"""The ledger servers of one run: their names and arguments, who of them holds the role, and what a dead one leaves.

Owns nothing but that; a supervisor starts and ends them like any other role. Index 0 is named ``ledger``, a standby
``ledger-K``. Whoever of them vanishes is started again and waits for its turn.
"""

from __future__ import annotations

from pathlib import Path

from rollbook.core.config import Config
from rollbook.rpc.address import forget, forget_all, holder_index

FIRST = "ledger"


def server_arguments(config: Config) -> dict[str, list[str]]:
    """Name of every ledger server to the arguments that make it that one, the first to be started first."""
    n = config.ledger.standbys
    return {FIRST: []} | {f"{FIRST}-{index}": ["--index", str(index)] for index in range(1, n + 1)}


def holder(run_dir: Path) -> str:
    """Name of the server that holds the role, as far as the run directory says; the first one where it does not."""
    index = holder_index(run_dir)
    return FIRST if not index else f"{FIRST}-{index}"


def forget_server(run_dir: Path, name: str) -> None:
    """Nobody shall look for a server that has ended."""
    forget(run_dir, int(name.removeprefix(FIRST).removeprefix("-") or 0))


forget_servers = forget_all
