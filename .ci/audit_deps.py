"""Asks OSV (osv.dev) which known vulnerabilities the pinned packages have.

Reads ``constraints.txt`` beside this file: everything that ``make env`` installs, in exact versions. An advisory that was looked
at and does not concern this project stands in ``accepted-advisories.txt`` with its reason. Needs nothing but Python.

Exit codes: 0 none that is not accepted, 1 some, 2 the pins are not exact, 3 OSV could not be asked, so nothing is known.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
URL = "https://api.osv.dev/v1/querybatch"
TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = 16 << 20
PAGES_MAX = 20
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9.!+_-]*)")


class NotAsked(Exception):
    """OSV gave no answer that can be used."""


def pins(text: str) -> dict[str, str]:
    """Name to version of every line. Raises ValueError for a line that pins nothing, or a name that stands there twice."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = PIN.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number}: {line!r} is no exact pin; write NAME==VERSION")
        name = normal(match[1])
        if name in found:
            raise ValueError(f"line {number}: {name} is pinned twice")
        found[name] = match[2]
    return found


def normal(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def accepted(text: str) -> dict[str, str]:
    """Advisory to reason. Raises ValueError for a line without a reason."""
    out = {}
    for number, line in enumerate(text.splitlines(), 1):
        advisory, _, reason = line.strip().partition(" ")
        if not advisory or advisory.startswith("#"):
            continue
        if not reason.strip():
            raise ValueError(f"line {number}: {advisory} is accepted without a reason")
        out[advisory] = reason.strip()
    return out


def advisories(packages: dict[str, str], url: str) -> dict[str, list[str]]:
    """Package to the advisories of its pinned version. Raises NotAsked."""
    found: dict[str, list[str]] = {}
    queries = {name: _query(name, version, "") for name, version in packages.items()}
    for _ in range(PAGES_MAX):
        answers = _ask(url, list(queries.values()))
        following = {}
        for name, answer in zip(queries, answers, strict=True):
            found.setdefault(name, []).extend(str(v["id"]) for v in answer.get("vulns", []))
            if answer.get("next_page_token"):
                following[name] = _query(name, packages[name], answer["next_page_token"])
        if not following:
            return {name: sorted(set(ids)) for name, ids in found.items() if ids}
        queries = following
    raise NotAsked(f"{url} has more than {PAGES_MAX} pages")


def _query(name: str, version: str, page: str) -> dict:
    query = {"package": {"name": name, "ecosystem": "PyPI"}, "version": version.partition("+")[0]}
    return query | ({"page_token": page} if page else {})


def _ask(url: str, queries: list[dict]) -> list[dict]:
    body = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            results = json.loads(answer.read(ANSWER_BYTES_MAX))["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotAsked(f"{url}: {type(error).__name__}: {error}") from None
    if not isinstance(results, list) or len(results) != len(queries) or not all(isinstance(r, dict) for r in results):
        raise NotAsked(f"{url} answered something else than one result for each of {len(queries)} packages")
    return results


def main(argv: list[str] | None = None) -> int:
    """Print what is known about each package; returns the exit code."""
    parser = argparse.ArgumentParser(description="known vulnerabilities of the pinned packages, by OSV")
    parser.add_argument("--constraints", type=Path, default=FOLDER / "constraints.txt")
    parser.add_argument("--accepted", type=Path, default=FOLDER / "accepted-advisories.txt")
    parser.add_argument("--url", default=URL)
    args = parser.parse_args(argv)
    try:
        packages = pins(args.constraints.read_text())
        known = accepted(args.accepted.read_text())
    except (OSError, ValueError) as error:
        print(f"audit-deps: {error}", file=sys.stderr)
        return 2
    try:
        found = advisories(packages, args.url)
    except NotAsked as error:
        print(f"audit-deps: NOT AUDITED, nothing is known about {len(packages)} packages: {error}", file=sys.stderr)
        return 3
    open_ones = 0
    for name, ids in sorted(found.items()):
        for advisory in ids:
            why = known.get(advisory, "")
            open_ones += not why
            print(f"{name}=={packages[name]}  {advisory}  {f'accepted: {why}' if why else 'KNOWN VULNERABILITY'}")
    print(f"audit-deps: {len(packages)} packages, {sum(map(len, found.values()))} advisories, {open_ones} not accepted")
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
