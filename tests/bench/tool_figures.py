"""What the ledger, the logs and the counter of effects say of one case of ``tool_gpu``: figures, and what is not as promised."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tool_gpu import Case

DIED = re.compile(r"(\S+ died \([^)]*\))")
DONE = re.compile(r"event=episodes_done generate_s=([0-9.]+) waited_s=([0-9.]+)")


def judged(case: Case, found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a run, and ``wrong``: everything that is not as promised."""
    metrics = [json.loads(m) for (m,) in case.rows("SELECT metrics_json FROM plan_outcome ORDER BY step")]
    rewards = [m["reward_mean"] for m in metrics]
    done = [tuple(map(float, m)) for m in DONE.findall(case.logs())]
    generate_s, wait_s = sum(g for g, _ in done), sum(w for _, w in done)
    fired = {p.name: p.stat().st_mtime for p in (case.dir / "chaos").glob("*")}
    accepted = sorted(at / 1e6 for (at,) in case.rows("SELECT accepted_at_us FROM sample"))
    tenth = max(1, len(rewards) // 10)
    figures: dict[str, Any] = {
        "steps": len(rewards), "kills": len(fired),
        "reward_mean": [round(r, 4) for r in rewards],
        "reward_first": round(sum(rewards[:tenth]) / tenth, 3) if rewards else None,
        "reward_last": round(sum(rewards[-tenth:]) / tenth, 3) if rewards else None,
        "samples": len(accepted), "verdicts": dict(case.rows("SELECT kind, count(*) FROM verdict GROUP BY kind")),
        "generate_s": round(generate_s, 2), "wait_s": round(wait_s, 2),
        "idle_share": round(wait_s / (generate_s + wait_s), 4) if generate_s + wait_s else None,
        "s_per_step": between(case), "generate_share_of_time": generate_share(case.logs()),
        "ms_per_recorded_call": apart_ms(case, "requested_at_us"), "ms_per_recorded_answer": apart_ms(case, "answered_at_us"),
        "kill_to_sample_s": {name: next((round(a - at, 1) for a in accepted if a > at), None) for name, at in fired.items()},
        "sandboxes": sorted({label.get("sandbox", {}).get("backend", "none") for label in labels(case)}),
        "workers_seen": len(labels(case)), "engine": labels(case)[0]["engine"] if labels(case) else None,
        "deaths": dict(Counter(DIED.findall("\n".join(found["output"])))),
        "logp_gap_abs_mean": mean(metrics, "logp_gap_abs_mean"),
        "tokens": mean(metrics, "tokens"),
    }  # fmt: skip
    figures |= calls_of(case) | masks_of(case)
    wrong = list(figures.pop("wrong_calls")) + list(figures.pop("wrong_masks"))
    if found["audit"] != "audit: clean":
        wrong.append(found["audit"])
    if found["exit_code"] or len(rewards) < case.args.steps:
        wrong.append(f"exit code {found['exit_code']} after {len(rewards)} of {case.args.steps} steps")
    if len(fired) < len(case.kills):
        wrong.append(f"of {sorted(case.kills)} only {sorted(fired)} fired")
    return figures | {"wrong": wrong}


def generate_share(log: str) -> float | None:
    """Share of the time between the ends of a process's batches in which its engine generated, loading included."""
    ends: list[tuple[datetime, float] | None] = []
    for line in log.splitlines():
        if found := DONE.search(line):
            ends.append((datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f"), float(found[1])))
        elif "event=failpoints_armed" in line:
            ends.append(None)
    pairs = [(a, b) for a, b in zip(ends, ends[1:], strict=False) if a and b]
    spent = sum((b[0] - a[0]).total_seconds() for a, b in pairs)
    return round(sum(b[1] for _, b in pairs) / spent, 3) if spent else None


def apart_ms(case: Case, column: str) -> float | None:
    """Median time between one call's record and the next one's, within a batch."""
    times = [at for (at,) in case.rows(f"SELECT {column} FROM tool_call WHERE {column} IS NOT NULL ORDER BY 1")]
    gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False) if b - a < 50_000)
    return round(gaps[len(gaps) // 2] / 1e3, 2) if gaps else None


def mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Of a figure over the steps that have it."""
    values = [m[name] for m in metrics if m.get(name) is not None]
    return round(sum(values) / len(values), 5) if values else None


def labels(case: Case) -> list[dict[str, Any]]:
    """What the workers' processes said of themselves."""
    return [json.loads(text) for (text,) in case.rows("SELECT labels_json FROM worker")]


def between(case: Case) -> float | None:
    """Median time between steps: what a step costs where nothing was killed."""
    ends = [at / 1e6 for (at,) in case.rows("SELECT finished_at_us FROM plan_outcome ORDER BY step")]
    gaps = sorted(b - a for a, b in zip(ends, ends[1:], strict=False))
    return round(gaps[len(gaps) // 2], 3) if gaps else None


def calls_of(case: Case) -> dict[str, Any]:
    """Calls as recorded against effects outside, by (slot, call index)."""
    effects = Counter(case.counter.read_text().split()) if case.counter.exists() else Counter()
    recorded = {
        f"{case.name}/{ordinal}.{sibling}/{index}": answer
        for ordinal, sibling, index, answer in case.rows("SELECT ordinal, sibling, call_index, response_json FROM tool_call")
    }
    answered = {key for key, answer in recorded.items() if answer is not None}
    wrong = []
    if unrecorded := set(effects) - set(recorded):
        wrong.append(f"{len(unrecorded)} calls ran that are not recorded")
    if missing := answered - set(effects):
        wrong.append(f"{len(missing)} calls have an answer and no effect")
    repeated = {key: n for key, n in effects.items() if n > 1}
    if repeated and not case.about["pure"]:
        wrong.append(f"{len(repeated)} calls of an impure tool ran more than once")
    ended = {f"{o}.{s}" for o, s in case.rows("SELECT ordinal, sibling FROM verdict UNION SELECT ordinal, sibling FROM lease")}
    if open_calls := [k for k in set(recorded) - answered if k.split("/")[1] not in ended]:
        wrong.append(f"{len(open_calls)} calls have no answer, and their slots have a sample")
    went_on = case.rows(
        "SELECT count(DISTINCT s.ordinal || '.' || s.sibling) FROM sample s JOIN tool_call c"
        " ON c.ordinal = s.ordinal AND c.sibling = s.sibling WHERE c.lease_token < s.lease_token"
    )[0][0]
    told = [json.loads(answer) for answer in recorded.values() if answer is not None]
    return {
        "calls": len(recorded), "calls_answered": len(answered), "calls_unanswered": len(recorded) - len(answered),
        "effects": sum(effects.values()), "calls_with_one_effect": sum(n == 1 for n in effects.values()),
        "calls_repeated": len(repeated), "rollouts_continued_by_another_worker": went_on,
        "sandbox_statuses": dict(Counter(a["sandbox_status"] for a in told)), "wrong_calls": wrong,
    }  # fmt: skip


def masks_of(case: Case) -> dict[str, Any]:
    """Every stored trajectory cut at its calls: behind each stands the codec's text of the answer, and only that is masked."""
    from rollbook.core.config import load_config
    from rollbook.core.packing import unpack_f32, unpack_i32
    from rollbook.rollout.journal import reply_from_json
    from rollbook.tasks.environment import load_environment
    from rollbook.tasks.turns import make_codec

    config = load_config(str(case.config), case.settings)
    environment, codec = load_environment(config), make_codec(config)
    calls: dict[tuple[int, int], list[tuple[int, bytes, str | None]]] = {}
    for ordinal, sibling, ids, answer in case.rows(
        "SELECT ordinal, sibling, token_ids, response_json FROM tool_call ORDER BY ordinal, sibling, call_index"
    ):
        calls.setdefault((ordinal, sibling), []).append((len(ids) // 4, ids, answer))
    checked = tool_tokens = sampled = 0
    wrong: list[str] = []
    for ordinal, sibling, tokens, mask_bytes, logprobs in case.rows(
        "SELECT ordinal, sibling, token_ids, loss_mask, logprobs FROM payload"
    ):
        ids, logps = list(unpack_i32(tokens)), list(unpack_f32(logprobs))
        mask, expected = list(mask_bytes) or [1] * len(ids), [1] * len(ids)
        for begin, prefix, answer in calls.get((ordinal, sibling), []):
            said = codec.reply_ids(environment.render(reply_from_json(answer))) if answer is not None else []
            end = begin + len(said)
            if end >= config.sampling.max_new_tokens and begin == len(ids):
                continue  # no room for the answer: the episode ended before it
            if prefix != tokens[: 4 * begin] or ids[begin:end] != said or not said:
                wrong.append(f"{ordinal}.{sibling}: {ids[begin:end]} where the codec renders {said}")
            expected[begin:end] = [0] * len(said)
        if mask != expected or any(lp for lp, was_sampled in zip(logps, mask, strict=True) if not was_sampled):
            wrong.append(f"{ordinal}.{sibling}: mask {mask}, expected {expected}, or a log-prob where nothing was sampled")
        checked += 0 in expected
        tool_tokens += expected.count(0)
        sampled += expected.count(1)
    if not checked:
        wrong.append("no trajectory has an answer of the tool in it")
    return {
        "trajectories_with_tool_text": checked, "tool_tokens_masked": tool_tokens, "tokens_trained": sampled,
        "wrong_masks": [f"{len(wrong)} trajectories: {'; '.join(wrong[:3])}"] if wrong else [],
    }  # fmt: skip
