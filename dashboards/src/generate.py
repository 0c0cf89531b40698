"""Writes what Grafana and Kubernetes load: `python dashboards/src/generate.py` rewrites every generated file.

Owns which files are generated. Never edits the rules; they are written by hand and wrapped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from boards import BOARDS
from panel_kit import build

DASHBOARDS = Path(__file__).resolve().parents[1]


def generated() -> dict[str, str]:
    """Path below dashboards/ to content."""
    encode = JSONEncoder(sort_keys=True, indent=1)
    files = {f"grafana/{board.uid}.json": encode.encode(build(board)) + "\n" for board in BOARDS}
    return files | {"kubernetes/prometheusrule.yaml": _prometheus_rule()}


def _prometheus_rule() -> str:
    written = sorted((DASHBOARDS / "prometheus" / "rules").glob("*.yml"))
    groups = [group for path in written for group in yaml.safe_load(path.read_text())["groups"]]
    rule = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "rollbook", "labels": {"role": "alert-rules"}}, "spec": {"groups": groups}}  # fmt: skip
    return "# Generated from ../prometheus/rules by src/generate.py.\n" + yaml.safe_dump(rule, sort_keys=False, width=130)


def main() -> int:
    """Write them all."""
    for name, text in generated().items():
        path = DASHBOARDS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
