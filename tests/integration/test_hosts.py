"""A run over several hosts with addresses of their own, in network namespaces of this machine; one of them is cut off."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from run_support import BOUND_S, REPOSITORY, environment

pytestmark = pytest.mark.timeout(3 * BOUND_S + 300)

NOT_TRIED = 3
"""Exit code of the drill where the machine lets it make no network of its own."""


def test_a_run_goes_on_without_the_host_of_its_ledger_server_and_with_it_again() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("HOSTS NOT TRIED: ray is not installed")
    command = [sys.executable, str(REPOSITORY / "chaos" / "hosts.py"), "--json", "--role", "ledger"]
    path = f"{REPOSITORY / 'service'}:{REPOSITORY / 'chaos'}"
    done = subprocess.run(
        command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=3 * BOUND_S + 250, check=False
    )  # fmt: skip
    if done.returncode == NOT_TRIED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "ledger" in found["lost"] and found["left_there"] == [] and found["audit"] == "audit: clean"
    assert found["cut"] in found["ledger_addresses"] and all(a.startswith("10.77.0.") for a in found["ledger_addresses"])
    assert found["steps"] > found["step_at_cut"] + 3
