"""How a role process hears that it is to stop: also while its main thread hangs in a library, and never longer than its grace."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from rollbook.cli import main as command_line
from rollbook.supervise import policy
from run_support import REPOSITORY, python_process

BOUND_S = 60.0

LISTENS = """
import sys, time
from rollbook.cli.signals import StopSignals
signals = StopSignals()
"""
STUCK_IN_A_LIBRARY = LISTENS + """
import ctypes
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
STOPS = LISTENS + "print('ready', flush=True)\nsys.exit(130 if signals.stop.wait(60) else 1)"
IGNORES = LISTENS + """
signals.limit(0.5, lambda: print("gives back", flush=True))
print("ready", flush=True)
time.sleep(600)
"""
WORKS_ON = LISTENS + "print('ready', flush=True)\nwhile True: time.sleep(600)"


def test_the_first_signal_asks_for_a_graceful_end() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with python_process(STOPS) as process:
            process.send_signal(number)
            assert process.wait(BOUND_S) == policy.EXIT_STOPPED


def test_a_role_that_does_not_end_within_its_grace_says_where_it_stands_and_ends() -> None:
    with python_process(IGNORES) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == policy.EXIT_LATE
        assert process.stdout is not None and process.stdout.read() == b"gives back\n"


@pytest.mark.parametrize("code", [STUCK_IN_A_LIBRARY, WORKS_ON])
def test_the_second_signal_ends_the_process_at_once_whatever_it_does(code: str) -> None:
    with python_process(code) as process:
        process.send_signal(signal.SIGTERM)
        for _ in range(600):
            process.send_signal(signal.SIGTERM)
            try:
                ended = process.wait(0.1)
                break
            except Exception:  # noqa: BLE001  still there: signals that come together count as one
                continue
        assert ended in (policy.EXIT_STOPPED, -signal.SIGTERM)


def test_every_exit_code_is_in_the_one_table() -> None:
    codes = {value for name, value in vars(policy).items() if re.fullmatch("EXIT_[A-Z]+", name) and isinstance(value, int)}
    assert set(policy.EXIT_CODES) == codes
    assert "supervise.policy" in (command_line.__doc__ or "")
    for file in (REPOSITORY / "service" / "rollbook" / "cli").glob("*.py"):
        assert not re.search(r"return ([3-9]|1[0-9]+)\b", Path(file).read_text()), file
