"""Whether a run directory is ahead of its ledger, and what is then to be done about it.

Owns the comparison of complete checkpoint and version directories with what the ledger records, and moving aside what
belongs to a history the ledger does not know. Never deletes and never loads a tensor. A database restored from an older
copy would otherwise go on silently from the past: what was acknowledged since would be lost without a word (P1), and files
of the lost history would lie among those of the new one (P4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.core.errors import Expired, LedgerBehind, NotFound
from rollbook.core.ports import LedgerPort
from rollbook.core.records import TASK_STREAM, Cursor, ResumePoint

MANIFEST = "MANIFEST.json"
ASIDE = "discarded."
"""Beginning of the name that a directory or revision is moved to; spooled samples get the ending ``.aside``."""
_CHECKPOINT = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_VERSION = re.compile(r"(\d+)\.(\d+)\.[0-9a-f]{12}")


@dataclass(frozen=True)
class Stray:
    """A file or directory of a history the ledger does not know."""

    path: Path
    step: int
    """Step whose result it holds; -1 where it holds none."""
    why: str
    lineage: int = 0
    """Of a version."""


@dataclass(frozen=True)
class Position:
    """Where a ledger stands."""

    point: ResumePoint
    cursor: Cursor

    @classmethod
    def of(cls, client: LedgerPort) -> Position:
        return cls(client.resume_point(), client.cursor(TASK_STREAM))

    @property
    def version(self) -> int:
        """Newest published version; -1 before the first."""
        return self.point.head.version if self.point.head else -1

    def __str__(self) -> str:
        newest = f"step {self.point.checkpoints[0].step}" if self.point.checkpoints else "none"
        return (
            f"lineage {self.point.lineage}, step {self.point.last_planned_step} planned, version {max(self.version, 0)} "
            f"published, task ordinal {self.cursor.next_ordinal}, newest checkpoint {newest}"
        )


def is_behind(ledger: Cursor, copy: Cursor) -> bool:
    """Whether the ledger's task stream stands before a checkpoint's copy of it.

    An accepted change of the dataset begins the stream again at the same ordinal, with an empty state.
    """
    is_same_place = ledger.next_ordinal == copy.next_ordinal and ledger.state_json != "{}"
    return ledger.next_ordinal < copy.next_ordinal or (is_same_place and ledger.state_json != copy.state_json)


def refuse_when_ahead(run_dir: Path, client: LedgerPort) -> None:
    """Refuse to go on from a ledger that is older than the files beside it.

    Raises:
        LedgerBehind: naming both positions, and both ways out.
    """
    position = Position.of(client)
    strays = ahead_of(run_dir, client, position)
    if strays:
        found = "; ".join(f"{stray.path.relative_to(run_dir)} ({stray.why})" for stray in strays)
        raise LedgerBehind(
            f"the ledger stands at {position}, but {run_dir} is ahead of it: {found}. The ledger was restored from an older "
            "copy. Best: restore the newer database (with its -wal file) and start again, nothing is lost then. Otherwise: "
            "`rollbook repair RUN --discard-newer-checkpoints` shows what would be set aside and made again; --yes does it"
        )


def ahead_of(run_dir: Path, client: LedgerPort, position: Position) -> list[Stray]:
    """What proves that the ledger has lost history: complete checkpoints, and versions beyond the one being published."""
    found = []
    for directory, match in _directories(run_dir / "checkpoints", _CHECKPOINT):
        manifest = _complete_manifest(directory)
        if manifest is not None and (why := _foreign(manifest, client, position)):
            found.append(Stray(directory, int(match[2]), why))
    beyond = position.version + 1  # whose bytes may be there before its row; a lineage's row comes before its first bytes
    versions = stray_versions(run_dir, position)
    return found + [stray for stray in versions if stray.step > beyond or stray.lineage > position.point.lineage]


def stray_versions(run_dir: Path, position: Position) -> list[Stray]:
    """Version directories of lineages or versions the ledger does not have."""
    found = []
    for directory, match in _directories(run_dir / "versions", _VERSION):
        lineage, version = int(match[1]), int(match[2])
        if lineage > position.point.lineage:
            found.append(Stray(directory, version, f"lineage {lineage} is unknown to the ledger", lineage))
        elif lineage == position.point.lineage and version > position.version:
            found.append(Stray(directory, version, f"the ledger has published version {position.version} last", lineage))
    return found


def strays_of(run_dir: Path, client: LedgerPort, position: Position, revision: int) -> list[Stray]:
    """Everything a repair sets aside: what ``ahead_of`` finds, and then the versions, revisions and spooled samples beside it.

    Spooled samples were leased in the lost history; their slots may not exist, or be leased to somebody else by now. What
    proves the loss comes first: moved last, it lets a repair that was interrupted find the rest again.
    """
    ahead = ahead_of(run_dir, client, position)
    if not ahead:
        return []
    found = {stray.path: stray for stray in [*ahead, *stray_versions(run_dir, position)]}
    for file in sorted((run_dir / "revisions").glob("*.json")):
        if file.stem.isdigit() and int(file.stem) > revision:
            found[file] = Stray(file, -1, f"the ledger is at revision {revision}")
    for file in sorted((run_dir / "spool").glob("*/*.sample")):
        found[file] = Stray(file, -1, "sampled under a lease of the lost history")
    return list(found.values())


def move_aside(stray: Stray) -> Path:
    """Give it a name that nothing reads any more, on the same file system; returns the new place."""
    path = stray.path
    target = path.with_name(f"{path.name}.aside" if path.suffix == ".sample" else f"{ASIDE}{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"{target.name.partition('~')[0]}~{number}")
    path.rename(target)
    return target


def goes_on_from(run_dir: Path, position: Position, discarded: list[Stray]) -> int:
    """Step of the newest checkpoint the ledger has committed and whose directory stays; 0 where training starts over."""
    root, gone = run_dir / "checkpoints", {stray.path for stray in discarded}
    kept = [c.step for c in position.point.checkpoints if root / c.dir_name not in gone and (root / c.dir_name).is_dir()]
    return max(kept, default=0)


def _directories(root: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for directory in sorted(root.iterdir()) if root.is_dir() else ():
        match = name.fullmatch(directory.name)
        if match is not None and directory.is_dir():
            yield directory, match


def _complete_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a directory that has every file it names, in its size; None otherwise (then it is merely damaged)."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
        stated = f"{manifest['lineage']}.{manifest['step']}.{manifest['epoch']}"
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
        is_whole = stated == directory.name and all((directory / n).stat().st_size == size for n, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if is_whole else None


def _foreign(manifest: dict[str, Any], client: LedgerPort, position: Position) -> str:
    """Why a checkpoint is not of the ledger's history; empty when it is."""
    lineage, step, chain = manifest["lineage"], manifest["step"], manifest["chain_digest"]
    if lineage > position.point.lineage:
        return f"lineage {lineage} is unknown to the ledger"
    if step == 0:
        recorded = position.point.chain_digests[0]
    else:
        try:
            recorded = client.read_plan(lineage, step).chain_digest
        except Expired:  # too old to be told, and to matter
            recorded = position.point.chain_digests.get(step, chain)
        except NotFound:
            return f"step {step}, the ledger's last plan is of step {position.point.last_planned_step}"
    if recorded != chain:
        return f"its chain of plans is {chain[:12]}, the ledger's at step {step} is {recorded[:12]}"
    copy = manifest.get("cursor")
    if copy is not None and is_behind(position.cursor, Cursor(**copy)):
        return f"it saw the task stream at ordinal {copy['next_ordinal']}, the ledger's stands at {position.cursor.next_ordinal}"
    return ""
