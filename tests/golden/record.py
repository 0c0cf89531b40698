"""Record the golden run again: ``python tests/golden/record.py --reason "why the digests change"``.

Makes a run of the whole service with a random model of 17 thousand parameters (fixed lag, float64 engine, a change of the
learning rate accepted on the way), replays it, and writes next to this file: ``ledger.sqlite.xz``, the database as
migration 0001 would hold it; ``digests.json``, what every step gave; and one more row of the table in ``README.md``. With
``--new-model`` the model is drawn anew as well. Nothing is written when the replay differs from the run.

With ``--replay RUN_DIR`` it prints what the product computes for the run in that directory, which is how the test asks.

Everything is computed in processes whose arithmetic does not depend on the processor: ``PINNED`` restricts the kernels of
torch, MKL, oneDNN and glibc to what every x86-64 has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MODEL, LEDGER, DIGESTS, README = HERE / "model", HERE / "ledger.sqlite.xz", HERE / "digests.json", HERE / "README.md"
ASSETS = REPOSITORY / "service" / "rollbook" / "assets" / "sort-digits"
FIRST_REVISION = "0001"
STEPS_BEFORE, STEPS = 4, 7
PINNED = {
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "DNNL_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY / "service"),
}  # fmt: skip

CONFIG = """
[run]
id = "golden"
dir = "run"
steps = 4
seed = 11

[model]
path = "model"

[task]
source = "jsonl"
path = "tasks.jsonl"
reward = "judge.py:spread"

[schedule]
kind = "fixed"
lag_versions = 1

[sampling]
max_new_tokens = 6

[learner]
groups_per_step = 2
group_size = 4
minibatches = 2
micro_batch_size = 2
lr = 3e-3
lr_schedule = "cosine"
warmup_steps = 2
weight_decay = 0.01

[checkpoint]
every_steps = 3

[[workers]]
engine = "transformers"
dtype = "float64"
slots = 8
max_model_len = 64
"""

JUDGE = '''
"""A reward that differs between nearly all completions, so that every step has something to learn."""

import zlib


def spread(completion, task):
    return zlib.crc32(completion.encode()) % 1000 / 999
'''


def environment() -> dict[str, str]:
    """Environment of every process that computes."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ROLLBOOK_")} | PINNED


def new_model() -> None:
    """Draw the model: one layer of width 32 over the sort-digits vocabulary."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    vocabulary = json.loads((ASSETS / "config.json").read_text())
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
            initializer_range=0.3, eos_token_id=vocabulary["eos_token_id"], bos_token_id=None,
            pad_token_id=vocabulary.get("pad_token_id"),
        )
    )  # fmt: skip
    shutil.rmtree(MODEL, ignore_errors=True)
    model.save_pretrained(MODEL)
    (MODEL / "generation_config.json").unlink(missing_ok=True)
    (MODEL / "model.safetensors").chmod(0o644)


def make_run(root: Path) -> Path:
    """The whole service under ``root``: four steps, then three more under another learning rate; returns the run directory."""
    shutil.copytree(MODEL, root / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, root / "model" / name)
    tasks = (ASSETS / "train.jsonl").read_text().splitlines(keepends=True)[:40]
    (root / "tasks.jsonl").write_text("".join(tasks))
    (root / "judge.py").write_text(JUDGE)
    (root / "run.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "rollbook.cli.main", "run", str(root / "run.toml"), "--no-report", "--plain"]
    subprocess.run(command, env=environment(), cwd=root, check=True)
    changes = [f"--set=run.steps={STEPS}", "--set=learner.lr=1e-3", "--accept=run.steps", "--accept=learner.lr"]
    subprocess.run([*command, *changes], env=environment(), cwd=root, check=True)
    return root / "run"


def unpack(run_dir: Path) -> str:
    """The recorded database and its configuration revisions as a run directory; returns the database's URL."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "ledger.sqlite").write_bytes(lzma.decompress(LEDGER.read_bytes()))
    return f"sqlite:///{run_dir}/ledger.sqlite"


def replay_all(run_dir: Path) -> list[dict[str, Any]]:
    """Digests of every step of a run directory, by the product's own replay; fails when a recorded version is not met."""
    from rollbook.core.config import config_from_json
    from rollbook.learner.replay import replay
    from rollbook.ledger.ledger import Ledger

    ledger = Ledger(f"sqlite:///{run_dir}/ledger.sqlite", holder="golden")
    try:
        (run_id,) = ledger.run_ids()
        ledger.attach(run_id)
        (run_dir / "revisions").mkdir(exist_ok=True)
        with sqlite3.connect(f"file:{run_dir}/ledger.sqlite?mode=ro", uri=True) as database:
            rows = database.execute("SELECT revision, config_json FROM config_revision").fetchall()
        configs = {revision: config_from_json(json.dumps(json.loads(text)["config"])) for revision, text in rows}
        for revision, one in configs.items():
            (run_dir / "revisions" / f"{revision}.json").write_text(one.to_json())
        config = configs[max(configs)]
        run, model = dataclasses.replace(config.run, dir=str(run_dir)), dataclasses.replace(config.model, path=str(MODEL))
        config = dataclasses.replace(config, run=run, model=model)
        genesis, out = ledger.resume_point().chain_digests[0], []
        for step in range(ledger.resume_point().last_planned_step + 1):
            result = replay(config, ledger, step)
            assert result["equal"] and not result["versions_missing"], result
            chain = ledger.read_plan(0, step).chain_digest if step else genesis
            digests = {name: result[name] for name in ("version_digest", "state_digest")}
            out.append({"step": step, **digests, "chain_digest": chain})
        return out
    finally:
        ledger.close()


def replayed(run_dir: Path) -> list[dict[str, Any]]:
    """``replay_all`` in a process of pinned arithmetic."""
    command = [sys.executable, str(HERE / "record.py"), "--replay", str(run_dir)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pack(run_dir: Path) -> None:
    """Write the rows of the database into one that only the first migration has made, in one compressed file."""
    import sqlalchemy as sa
    from alembic import command

    from rollbook.ledger import migrate

    first = run_dir / "first.sqlite"
    engine = sa.create_engine(f"sqlite:///{first}")
    with engine.connect() as conn:
        config = migrate._config()
        config.attributes["connection"] = conn
        command.upgrade(config, FIRST_REVISION)
        conn.commit()
    engine.dispose()
    with closing(sqlite3.connect(first)) as target:
        target.execute("ATTACH ? AS recorded", (str(run_dir / "ledger.sqlite"),))
        tables = [name for (name,) in target.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
        for table in (name for name in tables if name != "alembic_version" and not name.startswith("sqlite_")):
            columns = ", ".join(row[1] for row in target.execute(f"PRAGMA main.table_info({table})"))
            target.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM recorded.{table}")
        target.commit()
        target.execute("DETACH recorded")
        target.execute("VACUUM")
    LEDGER.write_bytes(lzma.compress(first.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def record(reason: str, *, with_new_model: bool) -> None:
    """Make the run, replay it, and replace the recorded files."""
    if with_new_model or not MODEL.is_dir():
        new_model()
    with tempfile.TemporaryDirectory() as scratch:
        keep(make_run(Path(scratch)), reason)


def keep(run_dir: Path, reason: str) -> None:
    """Replace the recorded files by those of a run, once its replay has met every version."""
    import torch
    import transformers

    steps = replayed(run_dir)
    pack(run_dir)
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    DIGESTS.write_text(json.dumps({"recorded_with": libraries, "steps": steps}, indent=1) + "\n")
    with README.open("a") as table:
        table.write(f"| {datetime.now(UTC):%Y-%m-%d} | {reason} | `{steps[-1]['state_digest'][:12]}` |\n")


def main() -> None:
    """Record, or print the digests of a run directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reason", help="what changed the digests; one line of the table")
    parser.add_argument("--new-model", action="store_true", help="draw the model anew")
    parser.add_argument("--replay", metavar="RUN_DIR", type=Path, help="print the digests of a run directory")
    args = parser.parse_args()
    if args.replay:
        print(json.dumps(replay_all(args.replay)))
    elif args.reason:
        record(args.reason, with_new_model=args.new_model)
    else:
        parser.error("--reason WHY is needed: a changed digest is a decision that people read about")


if __name__ == "__main__":
    main()
