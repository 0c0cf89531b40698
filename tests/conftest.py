"""Shared by all suites: says at the end, in one line, what could not run."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["ledger_bench"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    """Install the defect that ROLLBOOK_MUTANT names: in test processes only, to show that a test catches it."""
    if name := os.environ.get("ROLLBOOK_MUTANT", ""):
        from mutants.registry import install

        install(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A skipped test is a suite that could not run; it never reads as passed. Others' data that is not here is said apart."""
    reasons: dict[str, str] = {}
    absent: set[str] = set()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        text = text.removeprefix("Skipped: ")
        if text.startswith("published data"):
            absent.add(text)
        else:
            reasons.setdefault(text, report.nodeid.split("::")[0])
    for text in sorted(absent):
        terminalreporter.write_line(f"NOT TESTED, {text}")
    shown = "; ".join(f"{where} ({why})" for why, where in reasons.items())
    terminalreporter.write_line(f"suites not run: {shown or 'none'}")
