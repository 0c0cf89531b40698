"""Where the ledger servers of a run listen: files of the run directory, and addresses that the configuration fixes.

Owns ``ledger.address`` (one address a line, the holder of the role first; clients read it again on every reconnect, since a
restarted server may have another port) and ``ledger-K.address``, by which the server with index K tells the holder and the
supervisor where it listens. Every file has one writer at a time and is replaced as a whole; the holder writes its own again
with each renewal of its term, so that one that was replaced and wakes up late cannot stay in its place. Never decides whether
the server behind an address is alive.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from rollbook.core.errors import Unavailable

FILE_NAME = "ledger.address"


def write_address(run_dir: str | Path, address: str, others: Sequence[str] = ()) -> Path:
    """Replace the run's address file, so that a reader sees the old or the new addresses and nothing else.

    Args:
        address: of the server that holds the role.
        others: of servers that may hold it next.
    """
    path, lines = Path(run_dir) / FILE_NAME, list(dict.fromkeys([address, *others]))
    return path if _lines(path) == lines else _replace(path, lines)


def announce(run_dir: str | Path, index: int, address: str) -> Path:
    """Say where the server with this index listens, whether it holds the role or not."""
    return _replace(_own_file(run_dir, index), [address])


def announced(run_dir: str | Path) -> dict[int, str]:
    """Address by index of every server that has said where it listens."""
    found: dict[int, str] = {}
    for path in sorted(Path(run_dir).glob("ledger-*.address")):
        index = path.name.removeprefix("ledger-").removesuffix(".address")
        if index.isdecimal() and (lines := _lines(path)):
            found[int(index)] = lines[0]
    return found


def holder_index(run_dir: str | Path) -> int | None:
    """Index of the server that the run's address file names first; None when that is nobody who has announced itself."""
    first = _lines(Path(run_dir) / FILE_NAME)[:1]
    return next((index for index, address in announced(run_dir).items() if [address] == first), None)


def forget(run_dir: str | Path, index: int, address: str = "") -> None:
    """Take a server that has ended out of the files: its port may be somebody else's by now.

    With ``address`` only while it is the one announced: another process may be the server with this index by now.
    """
    file, own = Path(run_dir) / FILE_NAME, announced(run_dir).pop(index, "")
    if address and own != address:
        return
    _own_file(run_dir, index).unlink(missing_ok=True)
    if not own and announced(run_dir):
        return  # it had not got as far as to be found
    lines = _lines(file)
    left = [line for line in lines if own and line != own]
    if not left:
        file.unlink(missing_ok=True)
    elif left != lines:
        _replace(file, left)


def forget_all(run_dir: str | Path) -> None:
    """Remove every address file; for who knows that no server of the run lives."""
    for path in (Path(run_dir) / FILE_NAME, *Path(run_dir).glob("ledger-*.address")):
        path.unlink(missing_ok=True)


def addresses_in(run_dir: str | Path, fixed: Sequence[str] = ()) -> Callable[[], list[str]]:
    """Provider for ``LedgerClient`` that reads the address file each time; fixed addresses follow what it names.

    The provider raises Unavailable while there is neither.
    """
    path = Path(run_dir) / FILE_NAME

    def read() -> list[str]:
        try:
            lines = path.read_text().split()
        except OSError as error:
            if not fixed:
                text = f"no ledger address in {path} ({error.strerror}); is `rollbook ledger` running?"
                raise Unavailable(text) from error
            lines = []
        if not (lines or fixed):
            raise Unavailable(f"{path} is empty; restart `rollbook ledger`")
        return list(dict.fromkeys([*lines, *fixed]))

    return read


def address_in(run_dir: str | Path) -> Callable[[], str]:
    """As ``addresses_in``, for who wants the holder's alone."""
    read = addresses_in(run_dir)
    return lambda: read()[0]


def _own_file(run_dir: str | Path, index: int) -> Path:
    return Path(run_dir) / f"ledger-{index}.address"


def _lines(path: Path) -> list[str]:
    """What a file names; nothing when it is not there."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def _replace(path: Path, lines: Sequence[str]) -> Path:
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    os.replace(temporary, path)
    return path
