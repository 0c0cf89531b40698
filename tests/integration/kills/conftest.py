"""Runs of this folder, made once per session, two at a time, in the order in which the collected tests need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from harness import System
from scenarios import SCENARIOS

from postgres_server import NotObtainable

AT_ONCE = 2


@pytest.fixture(scope="session")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], System]]:
    """By scenario name, the finished system; what made it fail is raised in every test that asks for it."""
    made: list[System] = []
    root = tmp_path_factory.mktemp("kills")
    wanted: dict[str, None] = {}
    for item in request.session.items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = [*getattr(item, "fixturenames", ()), *(p for p in parameters if isinstance(p, str))]
        wanted |= dict.fromkeys(name for name in names if name in SCENARIOS)
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kills")
    futures: dict[str, Future[System]] = {name: pool.submit(SCENARIOS[name], root / name, made) for name in wanted}

    def result(name: str) -> System:
        try:
            return futures[name].result()
        except NotObtainable as error:
            pytest.skip(f"POSTGRESQL NOT RUN: {error}")

    yield result
    pool.shutdown(wait=False, cancel_futures=True)
    for system in made:
        system.end_everything()
    pool.shutdown(wait=True)


def _fixture(name: str) -> object:
    def scenario(finished: Callable[[str], System]) -> System:
        return finished(name)

    scenario.__doc__ = SCENARIOS[name].__doc__
    return pytest.fixture(scope="session", name=name)(scenario)


for _name in SCENARIOS:
    globals()[f"scenario_{_name}"] = _fixture(_name)
