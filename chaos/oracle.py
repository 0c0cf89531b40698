"""What must hold of a finished run, judged from its database and files alone.

Imports nothing of the product and uses no statement of it: ``oracle_rows`` reads whole tables, everything else is computed here,
digests included (sha256 over fields with an 8-byte little-endian length each). ``findings`` returns sentences; none means clean.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oracle_rows import Key, Ledger, Row, all_versions, digest_of_bytes, key_of, sha
from oracle_rows import connect as connect
from oracle_rows import read_ledger as read_ledger


def findings(tables: dict[str, list[Row]], run_dir: Path | None, *, steps: int, acks: list[Row] | None = None) -> list[str]:
    """Everything that is wrong with a finished run of ``steps`` steps, as ``check: detail``.

    ``acks``: answers to submissions as the workers received them; each one that says durable must be so.
    """
    ledger = Ledger(tables)
    found: list[str] = []
    for check in (samples, rewards, leases, plans, order, chain, versions, lag, conservation, failures, poison, turns, epochs):
        found += [f"{check.__name__}: {detail}" for detail in check(ledger)]
    found += [f"steps: {detail}" for detail in _steps(ledger, steps)]
    found += [f"submissions: {detail}" for detail in submissions(ledger)]
    found += [f"acknowledged: {detail}" for detail in _acknowledged(ledger, acks or [])]
    if run_dir is not None:
        found += [f"files: {detail}" for detail in files(ledger, run_dir)]
    return found


def samples(ledger: Ledger) -> Iterator[str]:
    """One sample per slot, each with its payload, whose bytes have the recorded digest and describe the same rollout."""
    for name, rows in (("sample", ledger["sample"]), ("payload", ledger["payload"])):
        for key, n in Counter(map(key_of, rows)).items():
            if n > 1:
                yield f"slot {key} has {n} rows in {name}"
    slots = set(map(key_of, ledger["slot"]))
    for key in ledger.samples.keys() ^ ledger.payloads.keys():
        yield f"slot {key} has a {'sample without payload' if key in ledger.samples else 'payload without sample'}"
    for key in ledger.samples.keys() - slots:
        yield f"sample {key} belongs to no slot"
    for key in ledger.samples.keys() & ledger.payloads.keys():
        sample, payload = ledger.samples[key], ledger.payloads[key]
        if digest_of_bytes(sample, payload) != sample["payload_digest"]:
            yield f"the bytes of sample {key} do not have the recorded digest"
        n = len(payload["token_ids"]) // 4
        logprobs = struct.unpack(f"<{n}f", bytes(payload["logprobs"]))
        if sample["n_tokens"] != n or not all(math.isfinite(x) and x <= 1e-3 for x in logprobs):
            yield f"sample {key} has {sample['n_tokens']} tokens recorded, {n} stored, or an impossible log-prob"
        numbers = struct.unpack(f"<{n}i", all_versions(payload))
        if (min(numbers), max(numbers)) != (sample["version_min"], sample["version_max"]):
            yield f"sample {key} states other versions than its bytes"
    for (incarnation, sequence), n in Counter((r["incarnation"], r["sequence"]) for r in ledger["sample"]).items():
        if n > 1:
            yield f"submission {sequence} of {incarnation} stands for {n} samples"


def submissions(ledger: Ledger) -> Iterator[str]:
    """Nothing was refused for its content. In bounded lag two attempts at a slot may differ, and the later one is refused."""
    fixed = ledger.rules["schedule"] == "fixed"
    bad: Counter[str] = Counter()
    for event in ledger["event"]:
        if event["kind"] not in ("submit_conflict", "submit_invalid"):
            continue
        sample = ledger.samples.get(key_of(event), {})
        stored_by = (sample.get("lease_token"), sample.get("incarnation"))
        other_attempt = bool(sample) and stored_by != (event["token"], event["incarnation"])
        if fixed or event["kind"] == "submit_invalid" or not other_attempt:
            bad[event["kind"]] += 1
    for kind, n in bad.items():
        yield f"{n} events {kind}"


def _acknowledged(ledger: Ledger, acks: list[Row]) -> Iterator[str]:
    """What a worker was told is durable is in the ledger: these bytes and, when accepted, by this submission."""
    for ack in acks:
        if ack["outcome"] not in ("accepted", "replayed"):
            continue
        key = (ack["key"][0], ack["key"][1])
        sample, payload = ledger.samples.get(key), ledger.payloads.get(key)
        stored = payload and hashlib.sha256(bytes(payload["token_ids"]) + bytes(payload["logprobs"]) + all_versions(payload))
        if sample is None or not stored or stored.hexdigest() != ack["bytes"]:
            yield f"sample {key} was {ack['outcome']}, but is not stored with these bytes"
        elif ack["outcome"] == "accepted" and any(sample[name] != ack[name] for name in ("incarnation", "sequence")):
            yield f"sample {key} was accepted from {ack['incarnation']}, but is stored from {sample['incarnation']}"


def _words(ids: tuple[int, ...]) -> Iterator[bytes]:
    """The tokens as text: 256 and 257 are special and left out, what the model has beyond them has a name."""
    for i in ids:
        if i not in (256, 257):
            yield bytes([i]) if i < 256 else f"<unused{i}>".encode()


def rewards(ledger: Ledger) -> Iterator[str]:
    """The reward is what comparing the stored bytes with the slot's own task gives: a byte model, exact match."""
    for key in ledger.samples.keys() & ledger.payloads.keys():
        sample, tokens = ledger.samples[key], bytes(ledger.payloads[key]["token_ids"])
        ids = struct.unpack(f"<{len(tokens) // 4}i", tokens)
        text = b"".join(_words(ids)).decode(errors="replace").strip()
        answer = json.loads(ledger.groups[key[0]]["task_json"])["answer"].strip()
        if sample["reward_status"] != "given" or sample["reward"] != float(text == answer):
            yield f"sample {key} says {text!r} for {answer!r} and has reward {sample['reward']} ({sample['reward_status']})"


def leases(ledger: Ledger) -> Iterator[str]:
    """Every sample was granted to exactly this worker under exactly this token and version; seeds come from the key.

    One that went on from recorded turns may have no token of the version it was leased for, but none of a newer one.
    """
    granted: dict[tuple[int, int, int], tuple[str, int, int]] = {}
    resumed = {key_of(row) for row in ledger["tool_call"]}
    for event in ledger["event"]:
        if event["kind"] == "lease_granted":
            detail = json.loads(event["detail_json"])
            place = (*key_of(event), event["token"])
            if place in granted:
                yield f"token {place} was granted twice"
            granted[place] = (event["incarnation"], detail["lineage"], detail["version"])
    for key, sample in ledger.samples.items():
        stated = (sample["incarnation"], sample["lineage"], sample["version_max"])
        lease = granted.get((*key, sample["lease_token"]), ("", -1, -1))
        if lease != stated and not (key in resumed and lease[:2] == stated[:2] and lease[2] > stated[2]):
            yield f"sample {key}: {stated} under token {sample['lease_token']} was not granted"
    for slot in ledger["slot"]:
        seed = int(sha("seed", ledger.rules["config_seed"], slot["ordinal"], slot["sibling"])[:16], 16) % 2**31
        if slot["seed"] != seed:
            yield f"slot {key_of(slot)} has seed {slot['seed']}, its key gives {seed}"


def _steps(ledger: Ledger, steps: int) -> Iterator[str]:
    """Steps 1..N, each planned once and ended once, each with its version."""
    wanted = list(range(1, steps + 1))
    for table in ("plan", "plan_outcome"):
        if sorted(r["step"] for r in ledger[table]) != wanted:
            yield f"{table} has steps {sorted(r['step'] for r in ledger[table])}, expected 1..{steps}"
    if sorted(r["version"] for r in ledger["policy_version"]) != [0, *wanted]:
        yield f"versions are {sorted(ledger.versions)}, expected 0..{steps}"


def plans(ledger: Ledger) -> Iterator[str]:
    """No sample in two plans; whole groups with the samples' own digests and rewards."""
    for key, n in Counter(map(key_of, ledger["plan_item"])).items():
        if n > 1:
            yield f"sample {key} is in {n} plan items"
    for step, plan in sorted(ledger.plans.items()):
        items = ledger.items[step]
        if [i["pos"] for i in items] != list(range(plan["n_items"])):
            yield f"step {step} has positions {[i['pos'] for i in items]}, planned were {plan['n_items']}"
        ordinals = sorted({i["ordinal"] for i in items})
        if len(ordinals) != plan["n_groups"] or plan["n_groups"] != ledger.rules["groups_per_step"]:
            yield f"step {step} has groups {ordinals}, planned were {plan['n_groups']}"
        if [key_of(i) for i in items] != sorted(map(key_of, items)):
            yield f"step {step} does not train its samples in order of slot"
        members = {(o, s) for o in ordinals for s in range(ledger.groups[o]["n_siblings"])} - ledger.verdicts
        if members != set(map(key_of, items)):
            yield f"step {step} splits groups at {sorted(members ^ set(map(key_of, items)))}"
        for item in items:
            sample = ledger.samples.get(key_of(item))
            if sample is None:
                yield f"step {step} trains {key_of(item)}, which has no sample"
            elif (item["payload_digest"], item["reward"]) != (sample["payload_digest"], sample["reward"]):
                yield f"step {step} trains {key_of(item)} under another digest or reward than the sample's"
    for step in ledger.items.keys() - ledger.plans.keys():
        yield f"items of step {step} have no plan"


def order(ledger: Ledger) -> Iterator[str]:
    """A step takes the oldest groups that were complete when it was planned; in fixed lag exactly its own."""
    size, step_of = ledger.rules["groups_per_step"], {i["ordinal"]: i["step"] for i in ledger["plan_item"]}
    complete_at = {}
    for ordinal, group in ledger.groups.items():
        members = [ledger.samples.get((ordinal, s)) for s in range(group["n_siblings"])]
        if all(members):
            complete_at[ordinal] = max(m["accepted_at_us"] for m in members if m)
    for step, plan in ledger.plans.items():
        ordinals = sorted({i["ordinal"] for i in ledger.items[step]})
        if ledger.rules["schedule"] == "fixed" and ordinals != list(range((step - 1) * size, step * size)):
            yield f"step {step} trains groups {ordinals}"
        passed_over = [
            o for o, at in complete_at.items()
            if o < max(ordinals, default=-1) and at < plan["planned_at_us"] and step_of.get(o, step + 1) > step
            and not any(key[0] == o for key in ledger.verdicts)
        ]  # fmt: skip
        if passed_over:
            yield f"step {step} passed over the complete groups {passed_over}"


def chain(ledger: Ledger) -> Iterator[str]:
    """The chain of plan digests, computed again from the first row."""
    previous = sha("genesis", ledger.run["run_id"], ledger.rules["config_seed"])
    at = {0: previous}
    for step, plan in sorted(ledger.plans.items()):
        fields: list[str | int] = ["items"]
        for item in ledger.items[step]:
            fields += [item["pos"], item["ordinal"], item["sibling"], item["payload_digest"], int(item["valid"])]
        content = sha(*fields)
        previous = at[step] = sha("chain", previous, step, content)
        if (plan["items_digest"], plan["chain_digest"]) != (content, previous):
            yield f"step {step} does not continue the chain"
    for row in ledger["checkpoint"]:
        if at.get(row["step"]) != row["chain_digest"]:
            yield f"checkpoint {row['step']} carries another chain digest"


def versions(ledger: Ledger) -> Iterator[str]:
    """Every ended step has a version row, written after its outcome, which was written after its plan."""
    for row in ledger["plan_outcome"]:
        step, version = row["step"], ledger.versions.get(row["step"])
        if version is None:
            yield f"step {step} ended as {row['outcome']} without a version"
        elif step in ledger.plans and not (
            ledger.plans[step]["planned_at_us"] <= row["finished_at_us"] <= version["published_at_us"]
        ):
            yield f"step {step} was not planned, ended and published in this order"


def lag(ledger: Ledger) -> Iterator[str]:
    """No planned token older than the bound or newer than the step's base; in fixed lag exactly the due version."""
    bound = {r["revision"]: r["max_lag_versions"] for r in ledger["config_revision"]}
    fixed = ledger.rules["schedule"] == "fixed"
    for step, plan in ledger.plans.items():
        if plan["base_version"] != step - 1:
            yield f"step {step} trains from version {plan['base_version']}"
        for item in ledger.items[step]:
            payload = ledger.payloads.get(key_of(item))
            if payload is None:
                continue
            numbers = set(struct.unpack(f"<{len(payload['token_ids']) // 4}i", all_versions(payload)))
            if min(numbers) < step - 1 - bound[plan["revision"]] or max(numbers) > step - 1:
                yield f"step {step} trains {key_of(item)} of versions {sorted(numbers)}"
            if fixed and numbers != {max(0, step - 1 - ledger.rules["fixed_lag_versions"])}:
                yield f"step {step} trains {key_of(item)} of versions {sorted(numbers)}, not of the one that was due"


def conservation(ledger: Ledger) -> Iterator[str]:
    """Ordinals without gaps, cursors behind them, and every slot in exactly one state."""
    if sorted(ledger.groups) != list(range(len(ledger.groups))):
        yield f"ordinals are {sorted(ledger.groups)}"
    for row in ledger["cursor"]:
        if row["next_ordinal"] != len(ledger.groups):
            yield f"cursor {row['stream']} stands at {row['next_ordinal']} after {len(ledger.groups)} groups"
    issued = {(o, s) for o, group in ledger.groups.items() for s in range(group["n_siblings"])}
    if issued != set(map(key_of, ledger["slot"])):
        yield f"slots differ from the groups' members at {sorted(issued ^ set(map(key_of, ledger['slot'])))[:10]}"
    leased, planned = set(map(key_of, ledger["lease"])), set(map(key_of, ledger["plan_item"]))
    for key in issued:
        state = (key in leased, key in ledger.samples, key in ledger.verdicts, key in planned)
        if state not in _STATES:
            yield f"slot {key} is at once (leased, submitted, ended, planned) = {state}"


_STATES = {
    (False, False, False, False), (True, False, False, False), (False, True, False, False), (False, True, False, True),
    (False, False, True, False), (False, True, True, False),
}  # fmt: skip
"""Pending, leased, submitted, planned, ended without a sample, ended with one."""


def failures(ledger: Ledger) -> Iterator[str]:
    """A row for each attempt that was reported as failed or fell silent, none with a reward; each failed slot has one."""
    told = {(*key_of(r), r["token"]) for r in ledger["event"] if r["kind"] in ("failure_reported", "lease_expired")}
    rows = {(*key_of(r), r["lease_token"]) for r in ledger["failure"]}
    for attempt in sorted(told ^ rows):
        has = "an event but no row" if attempt in told else "a row but no event"
        yield f"attempt {attempt} (ordinal, sibling, token) has {has}"
    for row in ledger["failure"]:
        if row["status"] == "given" or row["blame"] not in ("model", "infra", "unclear"):
            yield f"failure of slot {key_of(row)} has status {row['status']}, blame {row['blame']}"
    slots = {attempt[:2] for attempt in rows}
    for row in ledger["verdict"]:
        if row["kind"] == "failed" and key_of(row) not in slots:
            yield f"slot {key_of(row)} failed without a failed attempt"
    is_open = False
    for row in sorted(ledger["event"], key=lambda r: r["seq"]):
        if row["kind"] in ("breaker_opened", "breaker_closed"):
            if (row["kind"] == "breaker_opened") == is_open:
                yield f"{row['kind']} twice in a row"
            is_open = row["kind"] == "breaker_opened"
        elif row["kind"] == "step_planned" and is_open:
            yield f"a step was planned while the breaker was open: {row['detail_json']}"


def poison(ledger: Ledger) -> Iterator[str]:
    """A task was taken out for the workers it killed: they died over it, over nothing else each time, and it is gone for good."""
    died: dict[Key, set[str]] = defaultdict(set)
    for row in ledger["failure"]:
        if row["status"] == "no_verdict":
            died[key_of(row)].add(row["incarnation"])
    for event in ledger["event"]:
        said = json.loads(event["detail_json"]) if event["kind"] == "group_closed" else {}
        if not (killed := set(said.get("killed", ()))):
            continue
        ordinal, _, sibling = said["slot"].partition(".")
        key, group = (int(ordinal), int(sibling)), ledger.groups[event["ordinal"]]
        if key[0] != group["ordinal"] or not killed <= died[key] or len(set(said["workers"])) < 2:
            yield f"group {group['ordinal']} was taken out for {sorted(killed)}, slot {key} lost {sorted(died[key])}"
        for other, dead in died.items():
            if other[0] != group["ordinal"] and dead >= killed:
                yield f"slot {other} was at each death that group {group['ordinal']} was taken out for"
        for member in range(group["n_siblings"]):
            if (group["ordinal"], member) not in ledger.verdicts:
                yield f"slot {(group['ordinal'], member)} goes on though its group was taken out"
        if any(row["refills"] == group["ordinal"] for row in ledger["prompt_group"]):
            yield f"group {group['ordinal']} was taken out and refilled"


def turns(ledger: Ledger) -> Iterator[str]:
    """A sample with n answers of tools begins with what was recorded before each of its slot's first n calls, all answered."""
    calls: dict[Key, list[Row]] = defaultdict(list)
    for row in sorted(ledger["tool_call"], key=lambda r: r["call_index"]):
        if row["call_index"] != len(calls[key_of(row)]):
            yield f"calls of slot {key_of(row)} are not numbered without a gap"
        calls[key_of(row)].append(row)
    for key, payload in ledger.payloads.items():
        mask = bytes(payload["loss_mask"])
        ends = [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]
        if len(ends) > len(calls[key]):
            yield f"sample {key} has {len(ends)} answers of tools, its slot {len(calls[key])} calls"
        for end, call in zip(ends, calls[key], strict=False):
            same = all(bytes(payload[name])[: 4 * end] == bytes(call[name]) for name in ("token_ids", "logprobs"))
            if call["response_json"] is None or not same or (bytes(call["loss_mask"]) or b"\1" * end) != mask[:end]:
                yield f"sample {key} does not go on from its slot's call {call['call_index']}"


def epochs(ledger: Ledger) -> Iterator[str]:
    """No row of an older holder behind one of a newer: epochs never fall along the steps or exceed the fence."""
    newest = {row["role"]: row["epoch"] for row in ledger["fence"]}.get("learner", 0)
    for table, column in (("plan", "step"), ("plan_outcome", "step"), ("policy_version", "version")):
        seen = [row["epoch"] for row in sorted(ledger[table], key=lambda r, c=column: r[c])]
        if seen != sorted(seen) or (seen and seen[-1] > newest):
            yield f"epochs of {table} are {seen}, the fence is at {newest}"
    planned = {row["step"]: row["epoch"] for row in ledger["plan"]}
    for row in ledger["plan_outcome"]:
        if row["epoch"] < planned.get(row["step"], 0):
            yield f"step {row['step']} was ended by an older learner than planned it"


def files(ledger: Ledger, run_dir: Path) -> Iterator[str]:
    """Committed checkpoints and kept versions are whole on disk; nothing finished is left undelivered or set aside."""
    committed = sorted((r for r in ledger["checkpoint"] if r["state"] == "committed"), key=lambda r: r["step"])
    if len(committed) < 2 or committed[-1]["step"] != max(ledger.plans, default=0):
        yield f"committed checkpoints are {[r['step'] for r in committed]}"
    for row in committed:
        directory = run_dir / "checkpoints" / row["dir_name"]
        manifest = directory / "MANIFEST.json"
        if not manifest.exists() or hashlib.sha256(manifest.read_bytes()).hexdigest() != row["manifest_digest"]:
            yield f"checkpoint {row['step']}: manifest missing or not the committed one"
            continue
        for name, stated in json.loads(manifest.read_text())["files"].items():
            if hashlib.sha256((directory / name).read_bytes()).hexdigest() != stated["sha256"]:
                yield f"checkpoint {row['step']}: {name} differs from its manifest"
    newest = max(ledger.versions, default=-1)
    for number, row in ledger.versions.items():
        weights = run_dir / row["path"] / "model.safetensors"
        if weights.exists() and weights_digest(weights.read_bytes()) != row["digest"]:
            yield f"version {number}: the weights on disk have another digest"
        if number == newest and not weights.exists():
            yield f"version {number}: no weights on disk"
    done = ledger.samples.keys() | ledger.verdicts
    for path in sorted((run_dir / "spool").glob("*/*")):
        if path.name.endswith(".sample.aside"):  # a torn .tmp may be set aside: its worker died while it wrote
            yield f"{path.name} was set aside"
        elif path.suffix == ".sample" and _spooled_key(path.read_bytes()) not in done:
            yield f"{path.name}: a finished rollout was never delivered"


def _spooled_key(data: bytes) -> Key:
    start = len(b"rollbook spool 1\n")
    (length,) = struct.unpack_from("<I", data, start)
    ordinal, sibling = json.loads(data[start + 4 : start + 4 + length])["key"]
    return ordinal, sibling


def weights_digest(file: bytes) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor of a safetensors file, in order of name."""
    (length,) = struct.unpack_from("<Q", file)
    header = json.loads(file[8 : 8 + length])
    hasher = hashlib.sha256(b"rollbook weights 1")
    for name in sorted(set(header) - {"__metadata__"}):
        entry = header[name]
        start, end = entry["data_offsets"]
        shape = ",".join(map(str, entry["shape"]))
        for field in (name.encode(), entry["dtype"].encode(), shape.encode(), file[8 + length + start : 8 + length + end]):
            hasher.update(len(field).to_bytes(8, "little") + field)
    return hasher.hexdigest()


def identity(tables: dict[str, list[Row]]) -> dict[str, Any]:
    """All that a whole run computed, and nothing of who computed it when: equal for equal runs (oracle W)."""
    ledger = Ledger(tables)
    planned = {}
    for item in ledger["plan_item"]:
        key = key_of(item)
        payload, sample = ledger.payloads[key], ledger.samples[key]
        planned[(item["step"], item["pos"])] = (
            key, bytes(payload["token_ids"]), bytes(payload["logprobs"]), all_versions(payload), sample["reward"],
            sample["payload_digest"], sample["finish_reason"],
        )  # fmt: skip
    return {
        "prompts": {o: (bytes(g["prompt_ids"]), json.loads(g["task_json"])["answer"]) for o, g in ledger.groups.items()},
        "planned": planned,
        "versions": {number: row["digest"] for number, row in ledger.versions.items()},
        "chain": {step: row["chain_digest"] for step, row in ledger.plans.items()},
        "outcomes": {row["step"]: (row["outcome"], row["reason"]) for row in ledger["plan_outcome"]},
    }
