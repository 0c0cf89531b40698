"""A standby ledger server in this process, on both databases: when it takes the role, and what it leaves when it dies there."""

from __future__ import annotations

import contextlib
import json
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from ledger_support import Scene
from ledger_support import run_record as plain_record

from rollbook.cli.record import run_record
from rollbook.cli.serving import serve_ledger
from rollbook.cli.standby import serve_in_turn, server_index
from rollbook.core.config import Config, config_from_table, load_config
from rollbook.core.errors import ConfigError, ConfigMismatch, Standby, Unavailable
from rollbook.core.records import RunRecord
from rollbook.ledger.ledger import Ledger
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised
from rollbook.rpc.address import addresses_in, announced, holder_index
from rollbook.rpc.client import LedgerClient
from run_support import CONFIG, wait_until

pytestmark = pytest.mark.timeout(400)

TTL_S = 30.0
"""Nobody waits for it here: whoever ends lets the role go."""
POINTS = ("ledger.standby.before_fence", "ledger.standby.before_answers", "ledger.start.before_address",
          "ledger.start.after_address")  # fmt: skip


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.arm("")


class Server:
    """One ledger server in a thread of its own."""

    def __init__(self, target: Callable[..., None], config: Config, record: RunRecord, **options: Any) -> None:
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(target, config, record, options), daemon=True)
        self._thread.start()

    def _run(self, target: Callable[..., None], config: Config, record: RunRecord, options: dict[str, Any]) -> None:
        try:
            target(config, record, self.stop, **options)
        except Exception as error:  # noqa: BLE001  thread boundary: the test looks at it
            self.failure = error

    def join(self) -> BaseException | None:
        self._thread.join(150)
        assert not self._thread.is_alive()
        return self.failure

    def end(self) -> BaseException | None:
        self.stop.set()
        return self.join()


class Several:
    """The servers of one run, by index."""

    def __init__(self, root: Path, url: str, ttl_s: float = TTL_S) -> None:
        file = root / "run.toml"
        file.write_text(CONFIG + f'\n[ledger]\nurl = "{url}"\nrole_ttl_s = {ttl_s}\nstandbys = 2\n')
        self.config = load_config(file)
        self.dir = Path(self.config.run.dir)
        self.record = run_record(self.config)
        self.servers: list[Server] = []

    def start(self, index: int, record: RunRecord | None = None) -> Server:
        server = Server(serve_in_turn, self.config, record or self.record, index=index)
        self.servers.append(server)
        wait_until("the server listens", lambda: index in announced(self.dir) or server.failure)
        return server

    def client(self, address: str = "", **options: Any) -> LedgerClient:
        return LedgerClient(address or addresses_in(self.dir), self.config.run.id, **options)

    def refuses(self, index: int) -> bool:
        """Whether the server with this index says that it is a standby."""
        with self.client(announced(self.dir)[index], retry_total_s=0.0) as client:
            try:
                client.resume_point()
            except Standby:
                return True
        return False

    def held_by(self, index: int) -> None:
        wait_until(f"server {index} is the holder", lambda: holder_index(self.dir) == index)

    def end(self) -> None:
        for server in self.servers:
            server.end()


@pytest.fixture
def several(tmp_path: Path, ledger_url: str) -> Iterator[Several]:
    made = Several(tmp_path, ledger_url)
    yield made
    made.end()


def test_a_standby_waits_and_serves_on_when_the_holder_lets_go(several: Several) -> None:
    second = several.start(1)
    assert several.refuses(1), "it opens no new run"
    first = several.start(0)
    several.held_by(0)
    assert several.refuses(1) and addresses_in(several.dir)()[0] == announced(several.dir)[0]
    with several.client() as client:
        scene = Scene(client, several.record)  # type: ignore[arg-type]
        scene.feed(2)
        one, two = scene.lease(2)
        scene.submit([one])
        assert first.end() is None and 0 not in announced(several.dir)
        scene.submit([one, two])
        several.held_by(1)
        assert client.run_status()["slots"]["submitted"] == 2 and client.audit() == []
        roles = {role["role"]: role for role in client.run_status()["roles"]}
        assert roles["ledger"]["epoch"] == 2
        again = several.start(0)
        assert several.refuses(0), "who was the holder waits like everybody else"
        assert second.end() is None
        several.held_by(0)
        client.run_status()
    assert again.end() is None
    assert not list(several.dir.glob("*.address"))


def test_a_standby_that_is_told_to_stop_leaves_without_a_trace(several: Several) -> None:
    first, second = several.start(0), several.start(1)
    several.held_by(0)
    assert second.end() is None
    assert announced(several.dir).keys() == {0}
    with several.client(retry_total_s=0.0) as client:
        client.resume_point()
    assert first.end() is None


@pytest.mark.parametrize("point", POINTS)
def test_a_standby_that_dies_where_it_takes_the_role_is_followed_by_another(several: Several, point: str) -> None:
    first, second, third = several.start(0), several.start(1), None
    several.held_by(0)
    wait_until("the standby knows the holder", lambda: several.refuses(1))
    with several.client() as client:
        scene = Scene(client, several.record)  # type: ignore[arg-type]
        scene.feed(1)
        scene.fill(1)
    failpoints.arm(f"{point}=raise")
    assert first.end() is None
    assert isinstance(second.join(), FailpointRaised)
    failpoints.arm("")
    third = several.start(2)
    several.held_by(2)
    with several.client() as client:
        assert client.run_status()["slots"]["submitted"] == 1 and client.audit() == []
        scene = Scene(client, several.record, publish=False)  # type: ignore[arg-type]
        scene.fill(1)
    epochs = _epochs(several)
    assert epochs == sorted(set(epochs)), "each server has a larger epoch"
    assert third.end() is None


def _epochs(several: Several) -> list[int]:
    """Epochs of the servers that took the role, in order."""
    engine = sa.create_engine(several.config.ledger.url)
    with engine.connect() as conn:
        rows = conn.exec_driver_sql("SELECT detail_json FROM event WHERE kind = 'server_attached' ORDER BY seq").scalars().all()
    engine.dispose()
    return [json.loads(row)["epoch"] for row in rows]


def test_a_standby_of_another_configuration_refuses_when_its_turn_comes_and_lets_go(several: Several) -> None:
    first = several.start(0)
    several.held_by(0)
    second = several.start(1, run_record(load_config(several.dir.parent / "run.toml", ["run.seed=6"])))
    assert first.end() is None
    assert isinstance(second.join(), ConfigMismatch)
    third = several.start(2)
    several.held_by(2)
    assert third.end() is None


def test_a_database_that_never_answers_ends_the_server_that_opens_the_run(tmp_path: Path) -> None:
    silent = Several(tmp_path, "postgresql+psycopg://nobody@127.0.0.1:1/nowhere", ttl_s=0.5)
    server = silent.start(0)
    assert isinstance(server.join(), Unavailable)
    assert not list(silent.dir.glob("*.address"))


def test_an_ordinary_server_is_followed_by_a_standby_too(tmp_path: Path, sqlite_url: str) -> None:
    several = Several(tmp_path, sqlite_url)
    first = Server(serve_ledger, several.config, several.record)
    address = several.dir / "ledger.address"
    wait_until("the server is found", address.exists)
    second = several.start(1)
    assert several.refuses(1)
    assert first.end() is None
    several.held_by(1)
    assert second.end() is None


def test_the_servers_term_is_read_without_a_transaction_that_stays(postgres_url: str) -> None:
    with Ledger(postgres_url, holder="first", role_ttl_s=60.0) as first, Ledger(postgres_url, holder="standby") as standby:
        assert standby.server_term("run") is None
        first.open_run(plain_record())
        found = standby.server_term("run")
        assert found is not None and found[0] == "first" and 50.0 < found[1] <= 60.0
        with contextlib.closing(psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True)) as look:
            rows = look.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
                                "pid <> pg_backend_pid() AND xact_start IS NOT NULL").fetchone()  # fmt: skip
            assert rows == (0,)
    with Ledger(postgres_url, holder="later") as later:
        found = later.server_term("run")
        assert found is not None and found[1] <= 0, "a released role is free"


def _config(**ledger: Any) -> Config:
    table = tomllib.loads(CONFIG) | {"ledger": ledger}
    return config_from_table(table)


@pytest.mark.parametrize(
    ("ledger", "index", "standby", "expected"),
    [
        ({}, 0, False, None), ({}, 0, True, 1), ({}, 2, False, 2), ({}, 2, True, 2), ({"standbys": 1}, 0, False, 0),
        ({"standbys": 1}, 0, True, 1), ({"addresses": ["a:1", "b:2"]}, 0, False, 0), ({"addresses": ["a:1", "b:2"]}, 1, False, 1),
    ],
)  # fmt: skip
def test_which_server_a_process_is(ledger: dict[str, Any], index: int, standby: bool, expected: int | None) -> None:
    assert server_index(_config(**ledger), index, standby) == expected


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_that_no_listed_server_has_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match="servers 0 to 1"):
        server_index(_config(addresses=["a:1", "b:2"]), index, False)


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        ({"standbys": -1}, "at least 0"), ({"addresses": ["a"]}, "host:port"), ({"addresses": ["a:0"]}, "host:port"),
        ({"addresses": ["a:70000"]}, "host:port"), ({"addresses": ["a:1", "a:1"]}, "twice"), ({"addresses": "a:1"}, "a list"),
        ({"addresses": [1]}, r"ledger\.addresses\[0\] = 1: expected a string"),
        ({"addresses": ["a:1"], "standbys": 1}, "needs 2"), ({"address": "127.0.0.1:7001", "standbys": 1}, "cannot share"),
    ],
)  # fmt: skip
def test_servers_that_cannot_be_meant_are_refused(ledger: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(**ledger)
