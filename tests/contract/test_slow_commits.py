"""How long commits take is said while one is in hand, and forgotten when they are quick again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ledger_bench import Bench
from rollbook.ledger import writer
from rollbook.report.trouble import troubles
from run_support import wait_until


def test_a_commit_that_hangs_is_told_while_it_hangs_and_for_a_while_after(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    s = bench.scene(steps=1)
    entered, go_on = threading.Event(), threading.Event()

    def hang(txn: writer.Txn) -> None:
        entered.set()
        assert go_on.wait(60.0)

    def took_s() -> float:
        return float(s.ledger.run_status()["writer"]["commit_s"])

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(s.ledger._writer.run, hang)
        assert entered.wait(60.0)
        wait_until("the commit in hand is slow", lambda: took_s() > 0.2, 60.0)
        go_on.set()
        hanging.result(60.0)
    assert took_s() > 0.2, "the slowest of the last seconds"
    monkeypatch.setattr(writer, "SLOWEST_OF_S", 0.0)
    assert took_s() < 0.2 and troubles(s.ledger.run_status(), 0.0) == []
