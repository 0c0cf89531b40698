"""Whose kills for want of memory are counted: those of the roles' own control group, where it counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.supervise import memory


@pytest.mark.parametrize(
    ("own", "files", "n"),
    [
        ("9:name=systemd:/x\n4:memory:/mine\n0::/", {"memory/mine/memory.oom_control": 2, "memory/memory.oom_control": 9}, 2),
        ("4:cpu,memory:/above/what/is/mounted", {"memory/memory.oom_control": 5}, 5),
        ("4:memory:/above/mine/below", {"memory/mine/below/memory.oom_control": 2, "memory/memory.oom_control": 0}, 2),
        ("0::/mine", {"mine/memory.events.local": 1, "mine/memory.events": 4}, 1),
        ("0::/mine", {"mine/memory.events": 4, "memory.events": 6}, 4),
        ("0::/above/what/is/mounted", {"memory.events.local": 3}, 3),
        ("0::/mine/uncounted", {"mine/uncounted/cgroup.procs": 0, "mine/memory.events.local": 2, "memory.events": 6}, 2),
        ("0::/mine", {}, 7),
        ("", {}, 7),
    ],
)
def test_a_sandbox_that_met_its_memory_limit_is_not_taken_for_a_worker_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, int], n: int
) -> None:
    for name, count in (files | {"vmstat": 7}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n" * (not name.endswith("procs")))
    (tmp_path / "own").write_text(own)
    for name, path in (("CGROUPS", tmp_path), ("OWN_CGROUP", tmp_path / "own"), ("VMSTAT", tmp_path / "vmstat")):
        monkeypatch.setattr(memory, name, path)
    assert memory.oom_kills() == n
