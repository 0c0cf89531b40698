"""The environment of a run whose rewards a drill can make fail: the calculator, with a verifier that raises when told to."""

from __future__ import annotations

import os
from pathlib import Path

from rollbook.core.environments import Context, Episode, RewardResult
from rollbook.tasks.calculator import Calculator


class Judged(Calculator):
    """The calculator; while the file ``reward.failing`` is in the drill's control directory, ``score`` raises what it says."""

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """As the calculator judges, or not at all."""
        told = Path(os.environ["DRILL_CONTROL"]) / "reward.failing"
        if told.exists():
            raise RuntimeError(told.read_text())
        return await super().score(episode, context)
