"""What attacks are after, laid out on the machine's side: secrets, listeners, processes; and what is seen of a job from there.

Owns everything it makes and takes it away again. Never believes a program: a secret was shown or not, a process is there or not.
Every secret is drawn anew, so that a program cannot know one without having reached it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollbook.core.host import host
from rollbook.sandbox.trees import remove

SECRET_VARIABLE = "ROLLBOOK_ATTACK_ANSWERS"
SECRET_PREFIX = "rollbook-secret-"
_MARK_BYTES = 16


def secret(kind: str) -> str:
    """A new secret of ``kind``; what a program shows is matched against it."""
    return f"{SECRET_PREFIX}{kind}-{host().token()}"


@dataclass(frozen=True, slots=True)
class Seen:
    """One process of a job, as the machine's /proc shows it."""

    pid: int
    uid: int
    capabilities: int
    no_new_privs: bool
    rss_bytes: int


def look(name: str) -> tuple[Seen, ...]:
    """Living processes called ``name`` (at most 15 characters), in whatever namespaces below this one."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if Path(f"/proc/{entry}/comm").read_bytes().rstrip(b"\n") == name.encode():
                found.append(_seen(int(entry)))
    return tuple(process for process in found if process is not None)


def _seen(pid: int) -> Seen | None:
    text = Path(f"/proc/{pid}/status").read_bytes().decode("utf-8", "replace")
    fields = dict(line.split(":", 1) for line in text.split("\n") if ":" in line)
    if fields["State"].split()[0] in "ZX":
        return None
    return Seen(
        pid=pid,
        uid=int(fields["Uid"].split()[1]),
        capabilities=int(fields["CapEff"], 16),
        no_new_privs=fields.get("NoNewPrivs", "0").strip() == "1",
        rss_bytes=int(fields.get("VmRSS", "0 kB").split()[0]) * 1024,
    )


def end(name: str) -> None:
    """Kill what an attack left behind; the name is the attack's own and nobody else's."""
    for process in look(name):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


class Bait:
    """One per suite, made before the backend is, so that the backend could pass it on by mistake."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rollbook-bait-"))
        self.directory.chmod(0o755)
        self.drop = self.directory / "drop"
        self.drop.mkdir()
        self.drop.chmod(0o777)
        self.answers = self.directory / "answers.json"
        self.secrets = {"environment": host().environ[SECRET_VARIABLE]}
        for kind in ("file", "memory", "descriptor", "pipe", "process-environment", "process-arguments"):
            self.secrets[kind] = secret(kind)
        self.answers.write_text(self.secrets["file"])
        self.answers.chmod(0o644)
        self.property = self.directory / "property"
        """A file that nobody is to change."""
        self.property.write_text("kept")
        self._property = self._look_at_property()
        self._memory = ctypes.create_string_buffer(self.secrets["memory"].encode())
        self.memory_address = ctypes.addressof(self._memory)
        self.memory_bytes = len(self._memory)
        self.abstract_name = f"rollbook-bait-{host().token()}"
        self.abstract_log = f"rollbook-bait-{host().token()}"
        self.socket_path, self.log_path = self.directory / "service.sock", self.directory / "log.sock"
        self.reached: set[bytes] = set()
        self._stop = threading.Event()
        self._descriptors = self._leave_descriptors()
        self._listen()
        self._signals = self._take_signals()

    def close(self) -> None:
        """Take everything away."""
        self._stop.set()
        self._listener.join(timeout=2)
        for fd in self._descriptors:
            os.close(fd)
        remove(str(self.directory))

    def _take_signals(self) -> int:
        """A descriptor that becomes readable with the signal itself, whichever thread of the suite is awake."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        return reader

    def signalled(self, within_s: float) -> bool:
        """Whether SIGUSR1 came since the last call."""
        if not select.select([self._signals], [], [], within_s)[0]:
            return False
        return signal.SIGUSR1 in os.read(self._signals, 4096)

    def property_changed(self) -> bool:
        """Whether the file is another one than it was made."""
        return self._look_at_property() != self._property

    def _look_at_property(self) -> tuple[object, ...]:
        known = self.property.stat()
        return known.st_mode, known.st_mtime_ns, known.st_uid, known.st_gid, os.listxattr(self.property)

    def settle(self) -> None:
        """Return when the listeners have taken in whatever was sent before this call; bounded."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(2):  # one round of the listener may have begun before the mark came
                own = host().token()[:_MARK_BYTES].encode()
                sender.sendto(own, ("127.0.0.1", self.udp_port))
                deadline = host().monotonic() + 2.0
                while own not in self.reached and host().monotonic() < deadline:
                    host().sleep(0.002)

    def _leave_descriptors(self) -> list[int]:
        """Inheritable ones, the mistake that hands a secret to every child."""
        file = os.open(self.directory / "unlinked", os.O_RDWR | os.O_CREAT, 0o600)
        os.unlink(self.directory / "unlinked")
        os.write(file, self.secrets["descriptor"].encode())
        reader, writer = os.pipe()
        os.write(writer, self.secrets["pipe"].encode())
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        made = [file, reader, writer, directory]
        for fd in made:
            os.set_inheritable(fd, True)
        return made

    def _listen(self) -> None:
        tcp = socket.create_server(("127.0.0.1", 0))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        abstract.bind(f"\0{self.abstract_name}")
        named = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        named.bind(str(self.socket_path))
        logs = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        for log, place in zip(logs, (str(self.log_path), f"\0{self.abstract_log}"), strict=True):
            log.bind(place)
        for path in (self.socket_path, self.log_path):
            path.chmod(0o777)
        for listener in (abstract, named):
            listener.listen(16)
        self.tcp_port, self.udp_port = tcp.getsockname()[1], udp.getsockname()[1]
        listeners = ([tcp, abstract, named], [*logs, udp])
        self._listener = threading.Thread(target=self._serve, args=listeners, name="bait", daemon=True)
        self._listener.start()

    def _serve(self, streams: list[socket.socket], datagrams: list[socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in (*streams, *datagrams):
                selector.register(listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in selector.select(timeout=0.1):
                    with contextlib.suppress(OSError):
                        self._receive(key.fileobj)  # type: ignore[arg-type]
            for listener in (*streams, *datagrams):
                listener.close()

    def _receive(self, ready: socket.socket) -> None:
        if ready.type is socket.SOCK_DGRAM:
            self.reached.add(ready.recv(_MARK_BYTES))
            return
        connection, _ = ready.accept()
        with connection:
            connection.settimeout(1)
            self.reached.add(connection.recv(_MARK_BYTES))

    @contextlib.contextmanager
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the machine that holds secrets and minds its own affairs."""
        environment = {SECRET_VARIABLE: self.secrets["process-environment"]}
        code = "import time; time.sleep(600)"
        argv = [os.path.realpath(f"/proc/{os.getpid()}/exe"), "-I", "-S", "-c", code, self.secrets["process-arguments"]]
        child = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            yield child
        finally:
            child.kill()
            child.wait()
