"""Private PostgreSQL servers for tests and drills: own data directory, unix socket and loopback, fsync on; one may be a standby.

Raises ``NotObtainable`` with the reason when no server can be had; the caller turns it into a named skip.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_S = 60


class NotObtainable(Exception):
    """No PostgreSQL server can be started here."""


def _binaries() -> Path:
    found = [Path(p).resolve().parent for p in [shutil.which("initdb")] if p]
    found = [p for p in found if (p / "postgres").exists()]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name) if p.parent.name.isdigit() else 0)
    usable = [p for p in found if all((p / name).exists() for name in ("initdb", "pg_ctl", "postgres"))]
    if not usable:
        raise NotObtainable("initdb, pg_ctl and postgres are neither in PATH nor in /usr/lib/postgresql/*/bin")
    return usable[-1]


def _unprivileged() -> pwd.struct_passwd | None:
    """The account that owns the server when this process is root, which PostgreSQL refuses."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NotObtainable("this process is root and there is neither a user 'postgres' nor 'nobody' to run the server as")


class PostgresServer:
    """Started on construction; ``url(database)`` names a database, ``close`` removes everything."""

    def __init__(self) -> None:
        self._bin = _binaries()
        self._user = _unprivileged()
        self._killed = False
        self.root = Path(tempfile.mkdtemp(prefix="rollbook-pg-", dir=os.environ.get("ROLLBOOK_PG_DIR", "/tmp")))
        os.chmod(self.root, 0o755)
        self.data = self.root / "data"
        self.data.mkdir(mode=0o700)
        if self._user:
            for path in (self.root, self.data):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        try:
            self._make()
            with (self.data / "postgresql.conf").open("a") as conf:
                conf.write(
                    f"listen_addresses = '127.0.0.1'\nport = {self.port}\nunix_socket_directories = '{self.root}'\n"
                    "fsync = on\nsynchronous_commit = on\nmax_connections = 60\nshared_buffers = 32MB\nlogging_collector = off\n"
                )
            self.start()
        except NotObtainable:
            shutil.rmtree(self.root, ignore_errors=True)
            raise

    def _make(self) -> None:
        self._run(
            "initdb", "-D", str(self.data), "-U", "rollbook", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-instructions"
        )

    def _run(self, program: str, *arguments: str) -> None:
        become = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []} if self._user else {}
        log = self.root / "commands.log"
        with log.open("a") as out:
            done = subprocess.run(
                [str(self._bin / program), *arguments], cwd=self.root, stdout=out, stderr=out, timeout=START_S * 2,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(self.root), "LC_ALL": "C"}, check=False, **become,
            )  # fmt: skip
        if done.returncode != 0:
            raise NotObtainable(f"{program} failed with {done.returncode}: {log.read_text()[-400:]}")

    def start(self) -> None:
        self._run("pg_ctl", "start", "-D", str(self.data), "-w", "-t", str(START_S), "-l", str(self.root / "server.log"))

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "stop", "-D", str(self.data), "-w", "-t", str(START_S), "-m", mode)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://rollbook@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """An empty database; returns its name."""
        self._execute(f'CREATE DATABASE "{database}"')
        return database

    def drop(self, database: str) -> None:
        """Remove a database and end its connections."""
        self._execute(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        self.query(statement)

    def query(self, statement: str) -> list[tuple]:
        """Run one statement outside of any transaction; its rows, where it has any."""
        import psycopg

        with psycopg.connect(self.url().replace("+psycopg", ""), autocommit=True, connect_timeout=START_S) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def commit_waits_for(self, standby: str) -> None:
        """From now on a commit is acknowledged only when the standby of this name has flushed it; empty: by this server alone."""
        self._execute(f"ALTER SYSTEM SET synchronous_standby_names = '{standby}'")
        self._execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + START_S
        while standby and self.query("SELECT sync_state FROM pg_stat_replication WHERE sync_state = 'sync'") != [("sync",)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{standby} is no synchronous standby after {START_S} s")
            time.sleep(0.05)

    def kill(self) -> int:
        """SIGKILL the postmaster and every process it has started, and wait until none is left; returns how many there were."""
        postmaster = int((self.data / "postmaster.pid").read_text().split()[0])
        family = [postmaster, *(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == postmaster)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + START_S
        while any(_parent(pid) is not None for pid in family):
            if time.monotonic() > deadline:
                raise TimeoutError(f"PostgreSQL does not die: {family}")
            time.sleep(0.02)
        self._killed = True
        return len(family)

    def start_again(self) -> None:
        """Start after ``kill``. Raises RuntimeError when the server does not come back."""
        # Where nobody reaps orphans the dead postmaster's pid still answers, and its successor would not believe it dead.
        for left in (self.data / "postmaster.pid", *self.root.glob(".s.PGSQL.*.lock")):
            left.unlink()
        self._killed = False
        try:
            self.start()
        except NotObtainable as error:
            raise RuntimeError(f"PostgreSQL does not start after SIGKILL: {error}") from error

    def close(self) -> None:
        try:
            if not self._killed:
                self.stop("immediate")
        finally:
            shutil.rmtree(self.root, ignore_errors=True)


class StandbyServer(PostgresServer):
    """A streaming copy of ``primary``, which it follows under the name ``standby`` until it is promoted."""

    NAME = "standby"

    def __init__(self, primary: PostgresServer) -> None:
        self._primary = primary
        super().__init__()

    def _make(self) -> None:
        upstream = f"host=127.0.0.1 port={self._primary.port} user=rollbook application_name={self.NAME}"
        self._run("pg_basebackup", "-d", upstream, "-D", str(self.data), "-R", "-X", "stream", "-c", "fast", "--no-sync")
        self.data.chmod(0o700)

    def promote(self) -> None:
        """Take the primary's place; whoever calls it knows that the old primary is dead."""
        self._run("pg_ctl", "promote", "-D", str(self.data), "-w", "-t", str(START_S))


def both(first: PostgresServer, second: PostgresServer, database: str = "postgres") -> str:
    """A ledger URL that names two servers; whichever takes writes is used."""
    hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in (first, second))
    return f"postgresql+psycopg://rollbook@/{database}?{hosts}&target_session_attrs=read-write"


def _parent(pid: int) -> int | None:
    """Parent of a live process; None for one that is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[1])
