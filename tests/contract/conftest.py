"""What ledger contracts import by this name; the fixtures themselves are a plugin that every suite shares."""

from __future__ import annotations

from ledger_bench import WIDTH, Bench, ManualClock

__all__ = ["WIDTH", "Bench", "ManualClock"]
