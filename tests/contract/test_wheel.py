"""What an installed wheel can do on its own: open and migrate a ledger without the repository beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIGRATE = """
import rollbook, sys
from rollbook.ledger import migrate
assert rollbook.__file__.startswith(sys.argv[1]), rollbook.__file__
migrate.upgrade(sys.argv[2])
print(migrate.check(sys.argv[2]))
"""


def test_a_wheel_carries_its_migrations_and_assets_and_migrates_a_ledger(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("rollbook-*.whl"))) as wheel:
        wheel.extractall(site)
    assert (site / "rollbook" / "assets" / "sort-digits" / "model.safetensors").exists()
    assert not any(path.name.startswith("test_") for path in site.rglob("*.py"))
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    done = subprocess.run(
        [sys.executable, "-c", MIGRATE, str(site), url], check=True, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1] == "[]"
