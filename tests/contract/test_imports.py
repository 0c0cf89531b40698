"""Who may import what: layers, one folder per heavy library, and a slim client and server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "ray", "transformers", "numpy", "pandas", "pyarrow")


def in_fresh_interpreter(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "service", capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "module", ["rollbook.core.ports", "rollbook.ledger", "rollbook.ledger.ledger", "rollbook.rpc.client", "rollbook.rpc.server"]
)
def test_importing_the_slim_part_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & set({HEAVY!r})))"
    assert in_fresh_interpreter(code) == ""


def test_core_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import importlib, pkgutil, sys, rollbook.core\n"
        "before = set(sys.modules)\n"
        "for m in pkgutil.iter_modules(rollbook.core.__path__): importlib.import_module('rollbook.core.' + m.name)\n"
        "tops = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "print(*sorted(tops - set(sys.stdlib_module_names) - {'rollbook'}))"
    )
    assert in_fresh_interpreter(code) == ""


def test_layers_and_library_doors_hold() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
        env={"PYTHONPATH": str(ROOT / "service"), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "LANG": "C.UTF-8"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
