"""Sandboxes of the session: one per backend, with their zygotes warm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollbook.core.sandboxing import Sandbox
from rollbook.sandbox.backends import make_backend


@pytest.fixture(scope="session")
def zygote() -> Iterator[Sandbox]:
    sandbox = make_backend("zygote", 4)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="session")
def landlock() -> Iterator[Sandbox]:
    sandbox = make_backend("landlock", 2)
    yield sandbox
    sandbox.close()
