"""A run over several hosts with addresses of their own, and the host of one role cut off by taking its cable out.

    python chaos/hosts.py --role ledger [--hosts 3] [--json]

The hosts are network namespaces of this machine, joined by a bridge in a namespace of this process; nothing of it outlives the
process, and the machine's own network is not touched. Each host runs a raylet on its address; the run is served with tokens and
mutual TLS beyond loopback. Claim: roles of a host that is cut off are lost and go on on the others, the run makes steps
again while the host is still away, nothing of the run lives on there when it is back, and every audit is clean. Where the machine
allows no namespaces it says so and exits with 3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import oracle
from drills.runs import ROLLBOOK, Refused, environment
from ray_nodes import RayCluster
from rollbook.supervise import control, placements
from rollbook.supervise.process import ProcessRecord
from soaked_run import query

NET = "10.77.0."
SWITCH = f"{NET}254"
EXIT_NOT_TRIED = 3
BOUND_S = float(os.environ.get("TEST_BOUND_S", "200"))
"""Longest that anything here may take."""
INSIDE = "ROLLBOOK_DRILL_NAMESPACE"
MODEL = Path(__file__).resolve().parents[1] / "service" / "rollbook" / "assets" / "sort-digits"
UNSHARE = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))
TRIAL = "ip link add name t0 type bridge && ip link add name t1 type veth peer name t2 && unshare --net true"
HOLD = "import sys; print('ready', flush=True); sys.stdin.read()"
CONFIG = f"""
[run]
id = "hosts"
dir = "run"
steps = 1000000
seed = 7
chaos_allowed = true
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
[ledger]
address = "0.0.0.0:0"
standbys = 1
role_ttl_s = 5.0
lease_ttl_s = 10.0
heartbeat_s = 2.0
[supervisor]
backoff_s = 0.1
drain_s = 10.0
[cluster]
server_cpus = 0.1
worker_cpus = 1
unreachable_s = 4.0
orphan_s = 12.0
place_s = 5.0
[[workers]]
engine = "transformers"
count = 2
slots = 2
max_model_len = 64
"""


class Host:
    """A network namespace with one cable to the switch."""

    def __init__(self, number: int) -> None:
        self.address, self._cable = f"{NET}{number}", f"cable{number}"
        self._holder = subprocess.Popen(
            [*UNSHARE[0], sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == b"ready\n"
        pid = self._holder.pid
        _ip("link", "add", "name", self._cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("link", "set", self._cable, "master", "switch", "up")
        self.prefix = ("nsenter", f"--net=/proc/{pid}/ns/net", "--")
        _ip("addr", "add", f"{self.address}/24", "dev", "eth0", prefix=self.prefix)
        for link in ("eth0", "lo"):
            _ip("link", "set", link, "up", prefix=self.prefix)

    def cut(self) -> None:
        """Take the cable out."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Put it in again."""
        _ip("link", "set", self._cable, "up")

    def close(self) -> None:
        """The namespace goes with its last process."""
        self._holder.kill()
        self._holder.wait(10.0)


def _ip(*arguments: str, prefix: Sequence[str] = ()) -> None:
    done = subprocess.run([*prefix, "ip", *arguments], capture_output=True, text=True, timeout=30.0, check=False)
    if done.returncode:
        raise Refused(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def way_in() -> Sequence[str]:
    """The command that gives a namespace here. Raises Refused naming what is missing."""
    if missing := [program for program in ("unshare", "nsenter", "ip", "openssl") if shutil.which(program) is None]:
        raise Refused(f"{', '.join(missing)} is not installed (util-linux, iproute2, openssl)")
    said = ""
    for command in UNSHARE:
        trial = [*command, "sh", "-c", TRIAL]
        done = subprocess.run(trial, capture_output=True, text=True, timeout=30.0, check=False)
        if done.returncode == 0:
            return command
        said = done.stderr.strip()
    raise Refused(f"this machine lets us make no network of our own: {said}")


class Drill:
    """Hosts, a cluster on them, and a run; for a process in a namespace of its own."""

    def __init__(self, root: Path, n_hosts: int) -> None:
        self.root, self.dir = root, root / "run"
        self.env = environment()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "name", "switch", "type", "bridge")
        _ip("addr", "add", f"{SWITCH}/24", "dev", "switch")
        _ip("link", "set", "switch", "up")
        self.hosts = [Host(1 + i) for i in range(n_hosts)]
        self.cluster = RayCluster(0, env=self.env, address=SWITCH)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A raylet on every host, and the run."""
        self.cluster.start()
        self.cluster.join([self.cluster.prepare(3, 0, host.address, host.prefix) for host in self.hosts])
        names = [part for host in self.hosts for part in ("--host", host.address)]
        said = self.rollbook("security", "init", str(self.root / "secrets"), *names, "--run", "hosts")
        (self.root / "run.toml").write_text(CONFIG + said[said.index("[security]") :])
        with (self.root / "output.txt").open("wb") as out:
            command = [*ROLLBOOK, "up", str(self.root / "run.toml"), "--ray", self.cluster.address, "--plain", "--no-report"]
            self.process = subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def rollbook(self, *arguments: str) -> str:
        """Output of another command. Raises AssertionError when it fails."""
        done = subprocess.run([*ROLLBOOK, *arguments], env=self.env, capture_output=True, text=True, timeout=BOUND_S, check=False)
        assert done.returncode == 0, f"{arguments[0]}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def output(self) -> str:
        """What ``up`` has said."""
        file = self.root / "output.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """Poll within the bound; what it returned that is true."""
        deadline = time.monotonic() + BOUND_S
        while not (value := happened()):
            ended = self.process is not None and self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"{'ended' if ended else 'not in time'}: {what}\n{self.told()}"
            time.sleep(0.1)
        return value

    def told(self) -> str:
        """For a failure: the end of every log."""
        logs = sorted((self.dir / "logs").glob("*.log"))
        return "\n".join([self.output()[-3000:], *(f"--- {p.name}\n{p.read_text(errors='replace')[-800:]}" for p in logs)])

    def step(self) -> int:
        """Newest step that has ended."""
        rows = query(f"sqlite:///{self.dir / 'ledger.sqlite'}", "SELECT max(step) FROM plan_outcome")
        return (rows and rows[0][0]) or 0

    def where(self) -> dict[str, str]:
        """Address of the host of every role's newest process."""
        return {role: str(entry["node"]).split()[0] for role, entry in placements.newest(self.dir).items()}

    def living(self, address: str) -> list[str]:
        """Roles with a live process that was ever started on a host."""
        there = [e for e in placements.history(self.dir) if str(e["node"]).split()[0] == address]
        records = [ProcessRecord(e["role"], e["pid"], e["start_time"], e["incarnation"]) for e in there]
        return sorted({record.name for record in records if record.tree()})

    def cut_off(self, role: str) -> dict[str, Any]:
        """Cut the host of a role off until the run goes on without it; figures of that."""
        self.until("steps are made on every host", lambda: self.step() >= 3 and len(set(self.where().values())) >= 2)
        servers = {line.rpartition(":")[0] for line in (self.dir / "ledger.address").read_text().split()}
        address = self.where()[role]
        host = next(host for host in self.hosts if host.address == address)
        lost = sorted(name for name, at in self.where().items() if at == address)
        host.cut()
        began, before = time.monotonic(), self.step()
        self.until(f"what ran with {role} runs elsewhere", lambda: all(self.where()[name] != address for name in lost))
        placed_s = time.monotonic() - began
        first = self.until("the next steps", lambda: (s := self.step()) >= before + 3 and s)
        going_s = time.monotonic() - began
        self.until("nothing of the run lives on the host that is away", lambda: not self.living(address))
        host.mend()
        self.until("the run goes on with the host back", lambda: self.step() >= first + 3)
        return {
            "cut": address, "lost": lost, "ledger_addresses": sorted(servers), "elsewhere_s": round(placed_s, 1),
            "steps_again_s": round(going_s, 1), "step_at_cut": before, "left_there": self.living(address),
        }  # fmt: skip

    def end(self) -> dict[str, Any]:
        """Drain the run and judge it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code, url = self.process.wait(BOUND_S), f"sqlite:///{self.dir / 'ledger.sqlite'}"
        steps, audit = self.step(), self.rollbook("audit", str(self.root / "run.toml")).strip()
        return {
            "exit_code": code, "steps": steps, "audit": audit, "groups_left": [group["name"] for group in self.cluster.groups()],
            "oracle": list(oracle.findings(oracle.read_ledger(url, "hosts"), self.dir, steps=steps)),
            "outcome": control.read_state(self.dir).get("outcome"),
        }  # fmt: skip

    def close(self) -> None:
        """Everything that was started here."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        self.cluster.close()
        for host in self.hosts:
            host.close()


def wrong_in(found: Mapping[str, Any]) -> list[str]:
    """Everything that is not as claimed."""
    wrong = [*found["oracle"]]
    if any(not address.startswith(NET) for address in found["ledger_addresses"]):
        wrong.append(f"ledger servers are called by {found['ledger_addresses']}")
    expected = {"exit_code": 130, "audit": "audit: clean", "outcome": "stopped", "left_there": [], "groups_left": []}
    return wrong + [f"{name}: {found[name]}" for name, value in expected.items() if found[name] != value]


def main(argv: Sequence[str] | None = None) -> int:
    """The drill; what it found on the standard output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--role", default="ledger", help="role whose host is cut off: ledger, learner, worker-0, …")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        if INSIDE not in os.environ:
            command = [*way_in(), sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
            os.execvpe(command[0], command, os.environ | {INSIDE: "1"})
    except Refused as error:
        print(f"HOSTS NOT TRIED: {error}")
        return EXIT_NOT_TRIED
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    root = Path(tempfile.mkdtemp(prefix="hosts-", dir=os.environ.get("TMPDIR")))
    drill = Drill(root, args.hosts)
    try:
        drill.start()
        found = drill.cut_off(args.role)
        found |= drill.end()
        found["wrong"] = wrong_in(found)
    except AssertionError as error:
        found = {"wrong": [str(error)]}
    finally:
        with contextlib.suppress(Exception):  # what was found is told whatever its end brings
            drill.close()
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(found, indent=None if args.json else 1))
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
