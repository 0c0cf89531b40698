"""A tiny run as real processes: its configuration, ``rollbook run`` on it, bounded waits, and which roles are alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rollbook.supervise.process import ProcessRecord, ProcessTable

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "service" / "rollbook" / "assets" / "sort-digits"
ROLLBOOK = [sys.executable, "-m", "rollbook.cli.main"]
BOUND_S = float(os.environ.get("TEST_BOUND_S", "200"))
"""Longest that anything here may take; a wait that takes longer is a hang, except where others leave this machine no time."""

T = TypeVar("T")

CONFIG = f"""
[run]
id = "tiny"
dir = "run"
steps = 3
seed = 5

[model]
path = "{MODEL}"

[task]
source = "jsonl"
path = "{MODEL}/train.jsonl"

[sampling]
max_new_tokens = 13

[learner]
groups_per_step = 1
group_size = 2

[checkpoint]
every_steps = 2

[supervisor]
backoff_s = 0.1

[[workers]]
engine = "transformers"
slots = 2
max_model_len = 64
"""


def wait_until(what: str, happened: Callable[[], T], bound_s: float = BOUND_S, poll_s: float = 0.05) -> T:
    """Poll until ``happened`` returns something true, and return it."""
    deadline = time.monotonic() + bound_s
    while not (value := happened()):
        assert time.monotonic() < deadline, f"not within {bound_s:.0f} s: {what}"
        time.sleep(poll_s)
    return value


def environment(**more: str) -> dict[str, str]:
    """Environment of a command of the checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ROLLBOOK_")}
    return kept | {"PYTHONPATH": str(REPOSITORY / "service"), "OMP_NUM_THREADS": "1"} | more


def planted(code: str) -> str:
    """Code for another process, which plants first the defect that this one was told to (``make mutants``)."""
    if not (name := os.environ.get("ROLLBOOK_MUTANT", "")):
        return code
    here = str(REPOSITORY / "tests")
    return f"import sys\nsys.path.insert(0, {here!r})\nfrom mutants.registry import install\ninstall({name!r})\n{code}"


@contextmanager
def python_process(code: str, *arguments: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process of the checkout that has said ``ready``; killed with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", planted(code), *arguments], env=environment(**env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


class TinyRun:
    """One configuration file under ``root``, its run directory, and the ``rollbook run`` started last."""

    def __init__(self, root: Path, failpoints: Mapping[str, str] | None = None) -> None:
        """``failpoints``: name to action; each fires once over all processes, or with ``once = False`` once in each."""
        self.root, self.dir, self.config = root, root / "run", root / "run.toml"
        self.failpoints = dict(failpoints or {})
        self.once = True
        self.verb: tuple[str, ...] = ("run",)
        """The command that supervises, and what follows its CONFIG."""
        self.markers = root / "fired"
        self.markers.mkdir(parents=True)
        self.config.write_text(CONFIG)
        self.process: subprocess.Popen[bytes] | None = None
        self.output_file = root / "output.txt"
        self.output_file.touch()
        self._seen = 0

    def start(self, *arguments: str, stdout: int | None = None) -> None:
        """``rollbook run CONFIG`` in the background; ``output`` is what it prints from here on."""
        self._seen = self.output_file.stat().st_size
        armed = ",".join(f"{name}={action}" for name, action in self.failpoints.items())
        env = environment(ROLLBOOK_FAILPOINTS=armed, ROLLBOOK_FAILPOINTS_ONCE_DIR=str(self.markers) if self.once else "")
        with self.output_file.open("ab") as out:
            self.process = subprocess.Popen(
                [*ROLLBOOK, self.verb[0], str(self.config), *self.verb[1:], *arguments], env=env, cwd=self.root,
                stdin=subprocess.DEVNULL, stdout=out if stdout is None else stdout, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def output(self) -> str:
        """What the newest ``rollbook run`` has printed."""
        return self.output_file.read_bytes()[self._seen :].decode()

    def code(self, bound_s: float = BOUND_S) -> int:
        """Exit code of the run; a run that does not end within the bound is ended and is an error."""
        assert self.process is not None
        try:
            return self.process.wait(bound_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end within {bound_s:.0f} s\n{self.output()}\n{self.tails()}") from None

    def run(self, *arguments: str) -> tuple[int, str]:
        """``rollbook run`` to its end: exit code and what it printed."""
        self.start(*arguments)
        return self.code(), self.output()

    def wait_for(self, text: str) -> str:
        """Wait until the run has printed ``text``; fails when the run ends without it. Returns the output."""

        def printed() -> str:
            has_ended = self.process is not None and self.process.poll() is not None
            output = self.output()
            assert text in output or not has_ended, f"the run ended without {text!r}\n{output}\n{self.tails()}"
            return output if text in output else ""

        return wait_until(f"the run prints {text!r}", printed)

    def wait_fired(self, marker: str) -> None:
        """Wait until a failpoint has fired (``name@crossing``)."""
        wait_until(f"{marker} fires", lambda: (self.markers / marker).exists())

    def signal(self, number: int) -> None:
        """Signal the supervisor alone."""
        assert self.process is not None
        self.process.send_signal(number)

    def records(self) -> dict[str, ProcessRecord]:
        """Newest process of every role."""
        return ProcessTable(self.dir / "supervisor" / "processes.json").records()

    def alive(self) -> list[str]:
        """Roles whose newest process, or anything it has started, lives."""
        return [name for name, record in self.records().items() if record.tree()]

    def log(self, role: str) -> str:
        path = self.dir / "logs" / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def tails(self) -> str:
        """End of every role's log, for the message of a failed assertion."""
        return "\n".join(
            f"--- {p.name}\n{os.linesep.join(p.read_text(errors='replace').splitlines()[-15:])}"
            for p in sorted((self.dir / "logs").glob("*.log"))
        )

    def command(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of another ``rollbook`` command."""
        done = subprocess.run(
            [*ROLLBOOK, *arguments], env=environment(), cwd=self.root, capture_output=True, text=True, timeout=BOUND_S
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def end(self) -> None:
        """SIGKILL everything that still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10.0)
        for record in self.records().values():
            record.kill_tree()

    def steps(self) -> list[int]:
        """Steps the ledger has an outcome for, through the command line."""
        code, text = self.command("report", str(self.config))
        assert code == 0, text
        return [m["step"] for m in json.loads((self.dir / "report" / "metrics.json").read_text())]
