"""What an armed failpoint does, how it is armed, and that an observer sees every crossing."""

from __future__ import annotations

import contextvars
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.core.config import load_config
from rollbook.core.errors import ConfigError
from rollbook.core.host import Host, run_on
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised, failpoint
from run_support import CONFIG, environment

POINT = "learner.after_plan"
CHILD = f"""
import sys
from rollbook.observe.failpoints import failpoint
for crossing in range(1, 4):
    failpoint({POINT!r})
    print("passed", crossing, flush=True)
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.arm("")
    yield
    failpoints.set_observer(None)
    failpoints.arm("")


def child(**env: str) -> subprocess.Popen[str]:
    """A process that crosses POINT three times and says so after each."""
    return subprocess.Popen([sys.executable, "-c", CHILD], env=environment(**env), stdout=subprocess.PIPE, text=True)


def outcome(**env: str) -> tuple[int, list[str]]:
    process = child(**env)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.split("\n")[:-1]


@pytest.mark.parametrize(("armed", "passed"), [("crash", 0), ("crash@1", 0), ("crash@3", 2)])
def test_a_crash_is_a_kill_at_exactly_the_named_crossing(armed: str, passed: int) -> None:
    code, lines = outcome(ROLLBOOK_FAILPOINTS=f"{POINT}={armed}")
    assert code == -signal.SIGKILL and lines == [f"passed {n}" for n in range(1, passed + 1)]


@pytest.mark.parametrize("armed", ["", f"{POINT}=crash@4", "learner.after_step=crash"])
def test_what_is_not_reached_or_not_armed_does_nothing(armed: str) -> None:
    assert outcome(ROLLBOOK_FAILPOINTS=armed) == (0, ["passed 1", "passed 2", "passed 3"])


def test_a_point_fires_once_over_processes_that_share_a_directory(tmp_path: Path) -> None:
    env = {"ROLLBOOK_FAILPOINTS": f"{POINT}=crash@2", "ROLLBOOK_FAILPOINTS_ONCE_DIR": str(tmp_path / "fired")}
    assert outcome(**env)[0] == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "fired").iterdir()] == [f"{POINT}@2"]
    assert outcome(**env)[0] == 0


def test_a_pause_stops_the_process_until_somebody_continues_it() -> None:
    process = child(ROLLBOOK_FAILPOINTS=f"{POINT}=pause@2")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    assert process.stdout is not None and process.stdout.readline() == "passed 1\n"
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout.read() == "passed 2\npassed 3\n"
    assert process.wait(60) == 0


class Clock(Host):
    """A host on which sleeping takes no time."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_a_delay_waits_by_the_clock_of_its_host_and_goes_on() -> None:
    clock = Clock()

    def crossings() -> None:
        run_on(clock)
        failpoints.arm(f"{POINT}=delay:2.5@2")
        for _ in range(3):
            failpoint(POINT)

    contextvars.copy_context().run(crossings)
    assert clock.slept == [2.5]


@pytest.mark.parametrize(("name", "number"), [("ENOSPC", errno.ENOSPC), ("EIO", errno.EIO)])
def test_an_error_is_the_one_the_storage_would_raise(name: str, number: int) -> None:
    failpoints.arm(f"{POINT}=error:{name}")
    with pytest.raises(OSError, match=POINT) as raised:
        failpoint(POINT)
    assert raised.value.errno == number
    failpoint(POINT)


def test_raise_names_the_point() -> None:
    failpoints.arm(f" {POINT}=raise , learner.after_step=raise@2")
    assert failpoints.armed() == {POINT: "raise", "learner.after_step": "raise@2"}
    with pytest.raises(FailpointRaised, match=POINT):
        failpoint(POINT)
    failpoint("learner.after_step")
    with pytest.raises(FailpointRaised, match="after_step"):
        failpoint("learner.after_step")


def test_an_observer_sees_every_crossing_before_anything_armed_acts() -> None:
    seen: list[str] = []
    failpoints.set_observer(seen.append)
    failpoints.arm(f"{POINT}=raise")
    with pytest.raises(FailpointRaised):
        failpoint(POINT)
    failpoint(POINT)
    failpoint("learner.after_step")
    assert seen == [POINT, POINT, "learner.after_step"]
    failpoints.set_observer(None)
    failpoint(POINT)
    assert len(seen) == 3


class Killed(BaseException):
    """How a simulator ends a simulated process."""


def test_what_an_observer_raises_leaves_the_crossing() -> None:
    def kill(name: str) -> None:
        if name == POINT:
            raise Killed

    failpoints.set_observer(kill)
    failpoint("learner.after_step")
    with pytest.raises(Killed):
        failpoint(POINT)
    failpoints.arm("")
    with pytest.raises(Killed):
        failpoint(POINT)


@pytest.mark.parametrize(
    "text", [POINT, f"{POINT}=explode", f"{POINT}=crash@", f"{POINT}=crash@0", f"{POINT}=crash@x", f"{POINT}=pause:5",
             f"{POINT}=delay", f"{POINT}=delay:long", f"{POINT}=error", f"{POINT}=error:EPERM"],
)  # fmt: skip
def test_a_text_that_is_not_understood_arms_nothing_and_says_what_is(text: str) -> None:
    failpoints.arm("learner.after_step=raise")
    with pytest.raises(ValueError, match="delay:SECONDS, error:ENOSPC"):
        failpoints.arm(text)
    assert failpoints.armed() == {"learner.after_step": "raise"}
    with pytest.raises(ConfigError, match=r"chaos\.failpoints"):
        failpoints.arm_configured(text)


def test_a_configuration_arms_beside_the_environment_which_wins(tmp_path: Path) -> None:
    failpoints.arm(f"{POINT}=raise")
    failpoints.arm_configured(f"{POINT}=crash,learner.after_step=raise", tmp_path / "chaos")
    assert failpoints.armed() == {POINT: "raise", "learner.after_step": "raise"}
    with pytest.raises(FailpointRaised):
        failpoint("learner.after_step")
    assert [p.name for p in (tmp_path / "chaos").iterdir()] == ["learner.after_step@1"]
    failpoints.arm_from_environment()
    assert failpoints.armed() == {}


def test_an_unknown_name_is_refused_with_the_nearest_in_a_configuration_and_told_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"no failpoint 'learner\.after_plam'; did you mean 'learner\.after_plan'"):
        failpoints.arm_configured("learner.after_plam=crash")
    failpoints.arm("learner.after_plam=crash,learner.after_plan=crash")
    assert failpoints.unknown() == ["learner.after_plam"]


def test_a_configuration_arms_only_a_run_that_allows_faults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    armed = [f"chaos.failpoints={POINT}=crash"]
    with pytest.raises(ConfigError, match=r"run\.chaos_allowed = true"):
        load_config(file, armed)
    config = load_config(file, [*armed, "run.chaos_allowed=true"])
    assert config.chaos.failpoints == f"{POINT}=crash" and config.chaos.once
    assert config.digest() == load_config(file).digest(), "faults are not part of what is computed"


def test_a_share_fires_again_and_again_at_about_that_share_of_crossings() -> None:
    failpoints.arm(f"{POINT}=raise~0.3")
    assert failpoints.armed() == {POINT: "raise~0.3"}
    fired = 0
    for _ in range(2000):
        try:
            failpoint(POINT)
        except FailpointRaised:
            fired += 1
    assert 450 < fired < 750
    failpoints.arm(f"{POINT}=raise~1")
    for _ in range(3):
        with pytest.raises(FailpointRaised):
            failpoint(POINT)


@pytest.mark.parametrize("text", ["raise~0", "raise~1.01", "raise~", "raise~x", "raise~0.5@2", "raise~-1"])
def test_a_share_is_above_zero_and_at_most_one(text: str) -> None:
    with pytest.raises(ValueError, match="0 < P <= 1"):
        failpoints.arm(f"{POINT}={text}")
