"""Attacks on what is outside of the program's own processes and directory: files, signals, survivors, false success.

Owns sources and what is looked for. Files carry the attack's mark and are taken away; signals go to processes of the suite only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from rollbook.core.records import SandboxStatus
from rollbook.sandbox.attacks.probe import LOOK, Attack, Trial, Untried
from rollbook.sandbox.trees import directories

_ENTRIES_MAX = 20_000
_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/etc", "/usr/local", "/", "~")


def _written(trial: Trial) -> str:
    """The attack's file, in any of the places it tries."""
    found = []
    for place in (*_PLACES, str(trial.bait.drop), str(trial.bait.directory)):
        path = Path(place).expanduser() / trial.mark
        if os.path.lexists(path):
            found.append(str(path.parent))
            with contextlib.suppress(OSError):
                path.unlink()
    return f"it wrote outside its directory: {', '.join(found)}" if found else ""


def _planted(trial: Trial) -> str:
    """A path by which a reader on this side would follow the program's link: looked for in every directory for scratch space."""
    n = 0
    for top in sorted({os.path.realpath(place) for place in ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir())}):
        for directory, entries in directories(top):
            n += len(entries)
            if any(entry.name == trial.mark for entry in entries):
                return f"its link lies on this side, at {directory}"
            if n > _ENTRIES_MAX:
                break
    return ""


def _victim_ended(trial: Trial) -> str:
    return "it ended a process of the machine" if trial.victim_ended(within_s=0.2) else ""


def _parent_hit(trial: Trial) -> str:
    return "its signal reached the service" if trial.bait.signalled(within_s=0.2) else ""


def _outlived(trial: Trial) -> str:
    return f"{len(trial.left)} of its processes outlived it" if trial.left else ""


def _false_success(trial: Trial) -> str:
    """Left to itself, an exit code says "success"; the backend must not."""
    execution = trial.execution
    if execution is None:
        raise Untried("it did not end")
    if trial.lifted:
        return "its exit code alone says success" if execution.exit_code == 0 else ""
    return "its exit was taken for success" if execution.status is SandboxStatus.OK else ""


ATTACKS = (
    Attack(
        "write_outside",
        "leave a file in temporary, home and system directories, or above its own",
        f"places = {list(_PLACES)!r}"
        + """
import shutil
for place in [*places, B["drop"], os.path.dirname(B["drop"])]:
    try:
        with open(os.path.join(os.path.expanduser(place), B["mark"]), "w") as file:
            file.write("here")
    except OSError:
        pass
""",
        stage=1,
        while_held=_written,
    ),
    Attack(
        "planted_link",
        "plant links for the service to follow when it collects output",
        """
for name in (B["mark"], "out", "result.json", "stdout"):
    try:
        os.symlink(B["answers"], name)
    except OSError:
        pass
""",
        stage=1,
        while_held=_planted,
        required=False,
    ),
    Attack(
        "signal_host",
        "end a process of the machine by a signal",
        """
try:
    os.kill(B["victim"], signal.SIGKILL)
except OSError:
    pass
try:
    signal.pidfd_send_signal(os.pidfd_open(B["victim"]), signal.SIGKILL)
except OSError:
    pass
""",
        stage=1,
        needs_victim=True,
        while_held=_victim_ended,
    ),
    Attack(
        "signal_parent",
        "signal the service and its own parent, so that its own end looks like their failure",
        f"number = {int(signal.SIGUSR1)}"
        + """
for pid in {B["suite"], os.getppid()}:
    if pid > 0:
        try:
            os.kill(pid, number)
        except OSError:
            pass
""",
        stage=1,
        afterwards=_parent_hit,
        infra_is_escape=True,
    ),
    Attack(
        "signal_keeper",
        "end the process that holds it by any signal, by its number",
        """
for number in range(1, 65):
    try:
        os.kill(os.getppid(), number)
    except OSError:
        pass
time.sleep(0.2)
""",
        stage=1,
        infra_is_escape=True,
    ),
    Attack(
        "signal_group",
        "end the process that holds it by a signal to its process group, which need not end where its namespaces do",
        """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
    try:
        os.killpg(0, number)
    except OSError:
        pass
time.sleep(0.2)
""",
        stage=1,
        infra_is_escape=True,
    ),
    Attack(
        "odd_name",
        "bear a name that is no text, so that whoever reads it fails",
        """
if os.fork() == 0:
    _libc.prctl(15, b"\\xff) \\xfe", 0, 0, 0)
    time.sleep(1)
    os._exit(0)
time.sleep(0.3)
""",
        stage=1,
        limits=replace(LOOK, wall_s=3.0),
        infra_is_escape=True,
    ),
    Attack(
        "outliving",
        "leave a process behind that has a session of its own and holds the output open",
        """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
time.sleep(0.2)
""",
        stage=1,
        limits=replace(LOOK, wall_s=3.0),
        afterwards=_outlived,
    ),
    Attack(
        "exit_zero",
        "end with exit code 0 before it has answered",
        "os._exit(0)\n",
        afterwards=_false_success,
    ),
)
