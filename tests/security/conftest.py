"""One folder of certificates and tokens for all security tests: they only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from security_support import make_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("security") / "made"
    make_folder(made)
    return made
