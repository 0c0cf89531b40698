"""The bad network of the drills: no byte is lost or reordered, and each kind of trouble is what it says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from drills.proxy import GOOD, TOXICS, Proxy


class Echo:
    """Answers every byte with itself, and counts what has arrived."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.arrived = 0
        self.seen = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(4096):
                with self.seen:
                    self.arrived += len(data)
                    self.seen.notify_all()
                connection.sendall(data)
        except OSError:
            pass

    def wait(self, n: int) -> bool:
        with self.seen:
            return self.seen.wait_for(lambda: self.arrived >= n, 10.0)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    made = Proxy(lambda: echo.address)
    yield made
    made.close()


def connect(proxy: Proxy) -> socket.socket:
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def is_reset(proxy: Proxy) -> bool:
    """Whether a new connection ends at once; the reset may come while it is being made."""
    try:
        with connect(proxy) as connection:
            connection.sendall(b"x")
            return connection.recv(1) == b""
    except ConnectionError:
        return True


def received(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = connection.recv(4096)
        assert part, "the connection ended early"
        data += part
    return data


@pytest.mark.parametrize("toxic", ["latency", "bandwidth", "slicer"])
def test_a_slow_network_delivers_every_byte_in_order(toxic: str, proxy: Proxy) -> None:
    proxy.set(TOXICS[toxic])
    message = bytes(range(256)) * 2
    with connect(proxy) as connection:
        connection.sendall(message)
        assert received(connection, len(message)) == message
    assert proxy.n_connections == 1


def test_a_partition_delivers_late_what_it_held_back(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"first")
        assert received(connection, 5) == b"first"
        proxy.set(TOXICS["blackhole"])
        connection.sendall(b"later")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert echo.arrived == 5
        proxy.set(GOOD)
        connection.settimeout(10.0)
        assert received(connection, 5) == b"later"


def test_a_half_open_link_delivers_requests_and_holds_answers(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as connection:
        proxy.set(TOXICS["half-open"])
        connection.sendall(b"asked")
        assert echo.wait(5)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.set(GOOD)
        connection.settimeout(10.0)
        assert received(connection, 5) == b"asked"


def test_a_reset_ends_connections_and_lets_new_ones_be_made(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"x")
        assert received(connection, 1) == b"x"
        proxy.set(TOXICS["reset"])
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with connect(proxy) as connection:
        connection.sendall(b"y")
        assert received(connection, 1) == b"y"


def test_a_refusing_network_lets_nobody_in_until_it_is_over(proxy: Proxy) -> None:
    proxy.set(TOXICS["refuse"])
    assert is_reset(proxy)
    proxy.set(GOOD)
    with connect(proxy) as connection:
        connection.sendall(b"y")
        assert received(connection, 1) == b"y"


def test_a_server_that_is_not_there_is_told_by_a_reset() -> None:
    def nowhere() -> str:
        raise FileNotFoundError("no address yet")

    proxy = Proxy(nowhere)
    try:
        assert is_reset(proxy)
    finally:
        proxy.close()
