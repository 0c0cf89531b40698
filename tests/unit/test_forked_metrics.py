"""A role that was forked from a process which had imported everything long before counts its own time only."""

from __future__ import annotations

import json
import os
import subprocess
import sys

FORKS = """
import json, os
from rollbook.observe import devices, metrics

EARLIER_S = 5000.0
devices.WORKER_CLOCK._at -= EARLIER_S
metrics.STARTED_S -= EARLIER_S
if os.fork() == 0:
    devices.WORKER_CLOCK.settle()
    metrics.recovered("actor")
    made = [s for m in (metrics.GPU_SECONDS_TOTAL, metrics.RECOVERY_DURATION_SECONDS) for f in m.collect() for s in f.samples]
    seen = {s.name: s.value for s in made}
    print(json.dumps([seen["rollbook_gpu_seconds_total"], seen["rollbook_recovery_duration_seconds_sum"]]), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_process_counts_neither_idle_time_nor_recovery_from_before_it_was() -> None:
    env = {**os.environ, "ROLLBOOK_SUPERSEDES": "the dead one"}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, timeout=60, check=True)
    idle_s, recovery_s = json.loads(done.stdout)
    assert 0 < idle_s < 1000 and 0 < recovery_s < 1000
