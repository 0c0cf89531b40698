"""The committed generated code is what the ``.proto`` files give, and the ``.proto`` files keep the house rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto" / "rollbook" / "v1"
GENERATED = ROOT / "service" / "rollbook" / "v1"


def test_generating_again_gives_the_committed_code_byte_for_byte(tmp_path: Path) -> None:
    command = ["sh", str(ROOT / "proto" / "generate.sh"), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHON": sys.executable}, timeout=60)
    fresh = {p.name: p.read_bytes() for p in (tmp_path / "rollbook" / "v1").iterdir()}
    committed = {p.name: p.read_bytes() for p in GENERATED.glob("*pb2*") if p.is_file()}
    assert sorted(fresh) == sorted(committed)
    different = [name for name in fresh if fresh[name] != committed[name]]
    assert not different, f"{different} differ from what the .proto files give; run `make proto` and commit the result"


DECLARATION = re.compile(r"^\s*(message|enum|service|rpc|[\w.<>, ]+ \w+ = \d+;|[A-Z_0-9]+ = \d+;)")


@pytest.mark.parametrize("name", ["ledger.proto", "ledger_service.proto"])
def test_every_message_enum_field_and_rpc_has_a_comment(name: str) -> None:
    lines = (PROTO / name).read_text().splitlines()
    bare = [line.strip() for before, line in zip(lines, lines[1:], strict=False)
            if DECLARATION.match(line) and not before.strip().startswith("//")]  # fmt: skip
    assert bare == []
    assert sum(bool(DECLARATION.match(line)) for line in lines) > 100


def test_every_writing_rpc_names_its_key_and_every_reading_one_says_that_it_only_reads() -> None:
    text = (PROTO / "ledger_service.proto").read_text()
    service = text[text.index("service LedgerService {") : text.index("// Request of OpenRun.")]
    comments = re.findall(r"((?:  //.*\n)+)  rpc (\w+)\(", service)
    assert len(comments) == service.count("  rpc ")
    for comment, method in comments:
        assert re.search(r"\bKey\b|Read only|Repeatable", comment), f"{method}: which key makes it idempotent?"


def test_numbers_per_token_travel_as_bytes() -> None:
    text = (PROTO / "ledger.proto").read_text()
    for field in ("token_ids", "logprobs", "versions", "loss_mask", "prompt_ids"):
        assert set(re.findall(rf"^  (\w+) {field} = ", text, re.M)) == {"bytes"}
