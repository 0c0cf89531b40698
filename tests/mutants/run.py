"""``make mutants``: every defect must make a test of its threads fail by an assertion.

Runs the thread tests once as they are, then each defect in a process of its own with exactly the tests of its threads, on
SQLite (the defects stand above the engine), two processes at a time. Prints a table in Markdown; exit 1 when a defect survives.
``python -m mutants.run NAME …`` tries these alone, without the run as they are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.threads import THREADS, mutants_used, tests_of

ROOT = Path(__file__).parents[2]
AT_ONCE = 2
TIMEOUT_S = 900
ASSERTIONS = ("AssertionError", "assert ", "Failed: DID NOT RAISE")
NOTHING = ""
"""Name of the run without a defect."""


def reports(name: str, tests: list[str], folder: Path) -> dict[str, list[str]]:
    """Per test the ways its cases ended: passed, caught (an assertion), or broken (any other error)."""
    report = folder / f"{name or 'nothing'}.xml"
    environment = os.environ | {"ROLLBOOK_MUTANT": name, "OMP_NUM_THREADS": "1", "CI": "true"}
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not postgresql", f"--junitxml={report}",
        "-o", "junit_family=xunit1", *dict.fromkeys(tests),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if not report.exists():
        raise SystemExit(f"mutant {name!r}: no report\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    ended: dict[str, list[str]] = {test: [] for test in tests}
    for case in ElementTree.parse(report).iter("testcase"):
        node = f"{case.get('file')}::{(case.get('name') or '').partition('[')[0]}"
        ended.setdefault(node, []).append(_ending(case))
    return ended


def _ending(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    if failure is not None and (failure.get("message") or "").startswith(ASSERTIONS):
        return "caught"
    if failure is not None or case.find("error") is not None or case.find("skipped") is not None:
        return "broken"
    return "passed"


def main() -> int:
    """Run everything, or the defects named, and print the table; 0 when every defect was caught."""
    parser = argparse.ArgumentParser(description="plant known defects one by one; each must make a test fail")
    parser.add_argument("names", nargs="*", metavar="NAME", help="defects to try alone; default: all, and none")
    chosen = parser.parse_args().names
    if unknown := sorted(set(chosen) - set(mutants_used())):
        parser.error(f"no defect is called {', '.join(unknown)}")
    started, names = time.monotonic(), chosen or [NOTHING, *mutants_used()]
    everything = [test for row in THREADS for test, _ in row.cases]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = {name: pool.submit(reports, name, tests_of(name) or everything, Path(folder)) for name in names}
        ended = {name: job.result() for name, job in jobs.items()}
    failing = [test for test, endings in ended.pop(NOTHING, {}).items() if set(endings) != {"passed"}]
    print("| thread | test | mutant | caught |\n|---|---|---|---|")
    survived = []
    for row in THREADS:
        threads = ", ".join(row.threads)
        if row.reason and not chosen:
            print(f"| {threads} | not applicable: {row.reason} | | |")
        for test, name in (case for case in row.cases if case[1] in ended):
            caught = "caught" in ended[name][test]
            survived += [] if caught else [f"{name} ({', '.join(ended[name][test]) or 'its test did not run'})"]
            print(f"| {threads} | {test.partition('::test_')[2]} | {name} | {'yes' if caught else 'NO'} |")
    seconds = time.monotonic() - started
    n_caught = len(ended) - len({line.partition(" ")[0] for line in survived})
    print(f"\n{n_caught} of {len(ended)} mutants caught in {seconds:.0f} s; survived: {', '.join(survived) or 'none'}")
    if failing:
        print(f"failing without a mutant: {', '.join(failing)}")
    return 1 if survived or failing else 0


if __name__ == "__main__":
    sys.exit(main())
