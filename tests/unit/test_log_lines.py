"""What other processes say is one field of one line of the log, whatever characters they say it with."""

from __future__ import annotations

import logging

import pytest

from rollbook.observe import log as logs


def test_a_field_forges_no_line_and_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        logs.configure("worker")
        said = "no\n2026-01-01 ERROR ledger all is lost\x1b[2J"
        logging.getLogger("x").warning("refused", extra={"reason": said, "slot": "1.2 é", "_of_a_library": 7})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    written = capsys.readouterr().err
    assert written.count("\n") == 1 and "\x1b" not in written
    assert "_of_a_library" not in written, "what a library puts on every record is no field of ours"
    assert r"reason=no\n2026-01-01 ERROR ledger all is lost\x1b[2J slot=1.2 é" in written
