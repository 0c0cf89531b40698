"""A whole run through the ledger's verbs, on both databases."""

from __future__ import annotations

from ledger_bench import Bench
from rollbook.core.records import SlotKey


def test_a_bounded_run_goes_from_feed_to_checkpoint(bench: Bench) -> None:
    s = bench.scene(steps=3)
    for step in range(1, 4):
        s.feed(s.ledger.feed_demand(4))
        s.fill()
        plan = s.train(step)
        assert plan.base_version == step - 1
        assert [i.key for i in plan.items] == [SlotKey(o, k) for o in (2 * step - 2, 2 * step - 1) for k in (0, 1)]
    s.checkpoint(3)
    assert s.ledger.lease_slots(s.incarnation, s.head(), 4).drain
    assert s.ledger.feed_demand(4) == 0
    status = s.ledger.run_status()
    assert status["slots"]["applied"] == 12
    assert status["steps"] == {"configured": 3, "planned": 3, "trained": 3, "skipped": 0, "checkpoint": 3, "published": 3}
    assert s.ledger.resume_point().checkpoints[0].step == 3
