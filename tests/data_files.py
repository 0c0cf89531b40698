"""Published data that tests use where it is: it belongs to others, so it is never copied into the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def data_file(*parts: str) -> Path:
    """``$ROLLBOOK_DATA/…``, else a folder beside the checkout. Skips, loudly, where it is not."""
    places = [Path(os.environ.get("ROLLBOOK_DATA", REPOSITORY.parent / "shared" / "data"))]
    for place in places:
        if (file := place.joinpath(*parts)).is_file():
            return file
    pytest.skip(f"published data {'/'.join(parts)} is not in {places[0]}; set ROLLBOOK_DATA to a folder that holds it")
