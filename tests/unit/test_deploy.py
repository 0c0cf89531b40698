"""Manifests and units as they are shipped, held against what Kubernetes, KubeRay and systemd know; nothing is contacted."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollbook.cli.main import build_parser
from rollbook.core.settings import SupervisorConfig
from run_support import REPOSITORY

DEPLOY = REPOSITORY / "service" / "rollbook" / "assets" / "deploy"
ANY: Any = object()
PROBE = dict.fromkeys(
    ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold"), int
) | {"exec": {"command": [str]}}  # fmt: skip
POD = {
    "terminationGracePeriodSeconds": int,
    "containers": [{
        "name": str, "image": str, "env": [{"name": str, "value": str}],
        "resources": {"requests": {ANY: str}, "limits": {ANY: str}}, "livenessProbe": PROBE, "readinessProbe": PROBE,
        "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
    }],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "configMap": {"name": str}}],
}  # fmt: skip
META = {"name": str, "labels": {ANY: str}}
CLUSTER = {
    "rayVersion": str, "gcsFaultToleranceOptions": {"redisAddress": str},
    "headGroupSpec": {"rayStartParams": {ANY: str}, "template": {"spec": POD}},
    "workerGroupSpecs": [{
        "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "rayStartParams": {ANY: str},
        "template": {"spec": POD},
    }],
}  # fmt: skip
KINDS = {
    ("ray.io/v1", "RayJob"): {
        "entrypoint": str, "submissionMode": str, "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int,
        "backoffLimit": int, "rayClusterSpec": CLUSTER,
    },
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("v1", "PersistentVolumeClaim"): {"accessModes": [str], "resources": {"requests": {ANY: str}}},
    ("policy/v1", "PodDisruptionBudget"): {"maxUnavailable": int, "selector": {"matchLabels": {ANY: str}}},
}  # fmt: skip
"""What the fields that we use are called, and their types."""
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def unknown(value: Any, shape: Any, path: str = "") -> list[str]:
    """Where a manifest has a field that its kind does not, or one of another type."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{path}: not a table"]
        found = []
        for key, item in value.items():
            inner = shape.get(key, shape.get(ANY))
            found += [f"{path}.{key}: no such field"] if inner is None else unknown(item, inner, f"{path}.{key}")
        return found
    if isinstance(shape, list):
        items = value if isinstance(value, list) else [None]
        return [text for i, item in enumerate(items) for text in unknown(item, shape[0], f"{path}[{i}]")]
    return [] if type(value) is shape else [f"{path}: {value!r} is no {shape.__name__}"]


def manifests() -> list[dict]:
    files = [f for f in sorted((DEPLOY / "kuberay").glob("*.yaml")) if f.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def test_every_field_of_the_manifests_exists() -> None:
    kinds = []
    for manifest in manifests():
        kind = (manifest["apiVersion"], manifest["kind"])
        kinds.append(kind[1])
        assert unknown(manifest, {"apiVersion": str, "kind": str, "metadata": META, "spec": KINDS[kind]}) == []
    assert kinds == ["PersistentVolumeClaim", "PodDisruptionBudget", "RayCluster", "RayJob"]
    wrong = {"spec": {"containers": [{"livenesProbe": {}, "image": 3}]}}
    assert unknown(wrong, {"spec": POD}) == [
        ".spec.containers[0].livenesProbe: no such field", ".spec.containers[0].image: 3 is no str",
    ]  # fmt: skip


def pods() -> list[dict]:
    found = []
    for manifest in manifests():
        spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
        if "headGroupSpec" in spec:
            found += [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return found


def test_pods_outlast_a_drain_share_the_run_and_are_judged_by_their_raylet_alone() -> None:
    assert len(pods()) == 4
    for pod in pods():
        assert pod["terminationGracePeriodSeconds"] >= 2 * SupervisorConfig().drain_s + 10
        names = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == names == {"run", "config"}
            for probe in ("livenessProbe", "readinessProbe"):
                command = " ".join(container[probe]["exec"]["command"])
                assert "local_raylet_healthz" in command and "serve" not in command.lower()


def test_kustomize_names_files_that_are_here_and_one_that_the_user_brings() -> None:
    table = yaml.safe_load((DEPLOY / "kuberay" / "kustomization.yaml").read_text())
    assert unknown(table, {
        "apiVersion": str, "kind": str, "resources": [str], "configMapGenerator": [{"name": str, "files": [str]}],
        "generatorOptions": {"disableNameSuffixHash": bool},
    }) == []  # fmt: skip
    assert all((DEPLOY / "kuberay" / name).exists() for name in table["resources"])
    assert table["configMapGenerator"] == [{"name": "rollbook-config", "files": ["run.toml"]}]


def commands() -> list[str]:
    jobs = [m["spec"]["entrypoint"] for m in manifests() if m["kind"] == "RayJob"]
    return jobs + [start for unit in UNITS for start in re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)]


def test_every_command_is_one_that_exists() -> None:
    words = [shlex.split(command.replace("%i", "name")) for command in commands()]
    ours = [rest for program, *rest in words if Path(program).name == "rollbook"]
    assert len(ours) == 3
    for arguments in ours:
        assert build_parser().parse_args(arguments).command in ("run", "up")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_drain_before_they_kill_and_do_not_repeat_what_cannot_help(unit: Path) -> None:
    text = unit.read_text()
    fields = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert fields["KillMode"] == "mixed" and int(fields["TimeoutStopSec"]) >= 2 * SupervisorConfig().drain_s + 10
    assert fields["Restart"] == "on-failure"
    if "/rollbook " in fields["ExecStart"]:
        assert fields["RestartPreventExitStatus"] == "2 3 4" and fields["SuccessExitStatus"] == "130"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_to_object_to(tmp_path: Path) -> None:
    for unit in UNITS:
        text = re.sub(r"/opt/rollbook/bin/\w+", sys.executable, unit.read_text()).replace("User=rollbook\n", "")
        (tmp_path / unit.name.replace("@.", "@name.")).write_text(text)
    files = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *files], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if "rollbook" in line]
    assert done.returncode == 0 and ours == [], done.stderr
