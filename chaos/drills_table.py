"""The table of drills in ``chaos/README.md``: for every drill and setting its claim and the newest recorded verdict.

``python chaos/drills_table.py`` prints it, ``--write`` puts it between the marks in the README. No broken verdict is left out: it
stands until the same drill in the same setting was measured again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from drills.record import RESULTS, read

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- drills: begin -->", "<!-- drills: end -->"


def newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last entry of every command and database, in the order of drills."""
    last = {(e["drill"], e["database"], e["command"]): e for e in entries}
    return sorted(last.values(), key=lambda e: (e["drill"], e["database"], e["command"]))


def table(entries: list[dict[str, Any]]) -> str:
    """Markdown: claims, then a row per measured setting."""
    if not entries:
        return "No drill is recorded."
    claims = {e["drill"]: e["claim"] for e in entries}
    lines = ["| drill | claim |", "|---|---|", *(f"| `{name}` | {claim} |" for name, claim in sorted(claims.items())), ""]
    columns = ("drill, database", "command", "faults", "lost / twice / skipped / stale", "first new rollout", "first new step",
               "ETTR; time lost to faults", "verdict", "date, machine, revision")  # fmt: skip
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for e in newest(entries):
        n = e["numbers"]
        wrong = " / ".join(
            str(n.get(k, "?")) for k in ("acknowledged samples lost", "trained twice", "prompts skipped", "stale tokens trained")
        )
        first = e["findings"][0].splitlines()[0][:160] if e["findings"] else ""
        holds = "holds" if e["verdict"] == "holds" else f"**BROKEN**: {first}"
        machine = f"{e['date'][:10]}, {e['machine']['cores']} cores {e['machine']['cpu']}, {e['commit'] or e['code']}"
        ettr = f"{n['ettr']:.3f} over {n['wall_s']:.0f} s" if n.get("ettr") is not None else "—"
        lost = n.get("lost_share")
        ettr += f"; {lost:.1%}" if lost is not None else ""
        cells = (
            f"{e['drill']}, {e['database']}", f"`{e['command']}`", f"{n.get('faults injected', 0)} ({n.get('of these', '')})",
            wrong, n.get("time to first new rollout", "—"), n.get("time to first new step", "—"), ettr, holds, machine,
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the table in chaos/README.md")
    parser.add_argument("--check", action="store_true", help="exit 1 where chaos/README.md holds another table")
    parser.add_argument("--results", default=str(RESULTS))
    args = parser.parse_args()
    text = table(read(Path(args.results)))
    if not (args.write or args.check):
        print(text)
        return 0
    before = README.read_text()
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"
    if args.write:
        README.write_text(after)
        return 0
    if after != before:
        print("chaos/README.md does not hold the newest table: python chaos/drills_table.py --write", file=sys.stderr)
    return int(after != before)


if __name__ == "__main__":
    sys.exit(main())
