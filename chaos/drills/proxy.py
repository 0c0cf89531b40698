"""A TCP proxy on loopback that behaves as a bad network: latency, bandwidth, slices, resets, a partition, a half-open link.

Owns one listening port, and the connections through it. Bytes are never lost or reordered, as TCP guarantees: what a partition
holds back arrives late, or the connection ends. Runs an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

SLICE_WAIT_S = 0.002
CHUNK_BYTES = 65536
CONNECT_S = 5.0


@dataclass(frozen=True)
class Toxic:
    """How the network is now."""

    name: str
    latency_s: float = 0.0
    """Each way."""
    bytes_per_s: float = 0.0
    """Each way and connection; 0 = no limit."""
    slice_bytes: int = 0
    """Largest piece that is passed on at a time; 0 = as it comes."""
    holds_requests: bool = False
    """Nothing from clients to the server, until this is over."""
    holds_answers: bool = False
    """Nothing from the server to clients, until this is over."""
    refuses: bool = False
    """New connections are reset."""


GOOD = Toxic("none")
TOXICS = {
    toxic.name: toxic
    for toxic in (
        Toxic("latency", latency_s=0.2), Toxic("bandwidth", bytes_per_s=30_000.0), Toxic("slicer", slice_bytes=7),
        Toxic("blackhole", holds_requests=True, holds_answers=True), Toxic("half-open", holds_answers=True),
        Toxic("refuse", refuses=True), Toxic("reset"),
    )
}  # fmt: skip
"""``reset`` ends all connections at once with RST and is over; ``refuse`` does so and lets none be made."""


class Proxy:
    """One port that leads to wherever ``upstream`` says, asked anew for every connection."""

    def __init__(self, upstream: Callable[[], str]) -> None:
        """``upstream`` returns host:port, or raises OSError while there is no server."""
        self._upstream = upstream
        self._toxic = GOOD
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.n_connections = 0
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="proxy", daemon=True)
        self._thread.start()
        if not ready.wait(10.0):
            raise OSError("the proxy does not listen")

    def set(self, toxic: Toxic) -> None:
        """From now on."""
        asyncio.run_coroutine_threadsafe(self._set(toxic), self._loop).result(5.0)

    def close(self) -> None:
        """End every connection and stop listening."""
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(self._set(Toxic("closed", refuses=True)), self._loop).result(5.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _set(self, toxic: Toxic) -> None:
        self._toxic = toxic
        before, self._changed = self._changed, asyncio.Event()
        before.set()
        if toxic.refuses or toxic.name == "reset":
            for pair in list(self._links):
                for writer in pair:
                    _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        if self._toxic.refuses:
            _reset(writer)
            return
        try:
            host, _, port = self._upstream().rpartition(":")
            there = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CONNECT_S)
        except (OSError, ValueError, TimeoutError):
            _reset(writer)
            return
        pair = (writer, there[1])
        self._links.add(pair)
        try:
            await asyncio.gather(self._pump(reader, there[1], True), self._pump(there[0], writer, False))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._links.discard(pair)
            for one in pair:
                _reset(one)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_request: bool) -> None:
        """Pass bytes on in one direction until the sender has ended; then the whole link ends."""
        while data := await reader.read(CHUNK_BYTES):
            toxic = await self._passable(is_request)
            if toxic.latency_s:
                await asyncio.sleep(toxic.latency_s)
            size = toxic.slice_bytes or len(data)
            for start in range(0, len(data), size):
                toxic = await self._passable(is_request)
                writer.write(data[start : start + size])
                await writer.drain()
                if toxic.slice_bytes:
                    await asyncio.sleep(SLICE_WAIT_S)
            if toxic.bytes_per_s:
                await asyncio.sleep(len(data) / toxic.bytes_per_s)
        raise ConnectionResetError

    async def _passable(self, is_request: bool) -> Toxic:
        """Wait while the network holds this direction back."""
        while self._toxic.holds_requests if is_request else self._toxic.holds_answers:
            await self._changed.wait()
        return self._toxic


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST instead of an orderly close."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
