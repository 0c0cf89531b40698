"""A run as Parquet files that pandas, Polars and DuckDB open: steps, samples, failures, events.

Owns the files and the names of their columns. Never writes to the ledger. Rows are written as they are read, page by page, so
memory does not grow with the run; a file has its name only when it is whole. Needs pyarrow (``rollbook[export]``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollbook.core.errors import ConfigError
from rollbook.core.packing import unpack_f32, unpack_i32
from rollbook.ledger import schema as t
from rollbook.ledger.readonly import PAGE_ROWS, Reader

FORMATS = ("parquet",)
TABLES = ("steps", "samples", "failures", "events")
SAMPLES_WITH_TOKENS = 200
"""Samples read at a time where their payloads are read too."""
Rows = Iterator[list[dict[str, Any]]]


def export(reader: Reader, out_dir: Path, *, with_tokens: bool = False) -> dict[str, int]:
    """Write one file a table under ``out_dir``; returns rows by table. ``with_tokens``: payloads of samples as list columns.

    Raises: ConfigError when pyarrow is not installed.
    """
    arrow, parquet = _arrow()
    out_dir.mkdir(parents=True, exist_ok=True)
    sources: Mapping[str, tuple[list[Any], Rows]] = {
        "steps": (_step_schema(arrow), _steps(reader)),
        "samples": (_sample_schema(arrow, with_tokens), _samples(reader, with_tokens)),
        "failures": (_failure_schema(arrow), _timed(reader.pages(t.failure), "reported_at_us")),
        "events": (_event_schema(arrow), _timed(reader.pages(t.event), "at_us")),
    }
    counts = {}
    for name, (fields, pages) in sources.items():
        schema = arrow.schema(fields).with_metadata({"run_id": reader.run_id, "table": name})
        counts[name] = _write(arrow, parquet, schema, pages, out_dir / f"{name}.parquet")
    return counts


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("`rollbook export --format parquet` needs pyarrow; pip install 'rollbook[export]'") from None
    return pyarrow, pyarrow.parquet


def _write(arrow: Any, parquet: Any, schema: Any, pages: Rows, file: Path) -> int:
    temporary, n = file.with_name(f".{file.name}.tmp"), 0
    try:
        with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for page in pages:
                columns = {f.name: [row.get(f.name) for row in page] for f in schema}
                writer.write_table(arrow.table(columns, schema=schema))
                n += len(page)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return n


def _timed(pages: Rows, *names: str) -> Rows:
    """``…_at_us`` as ``…_at``: timestamps, which every reader shows as such."""
    for page in pages:
        yield [{n.removesuffix("_us") if n in names else n: value for n, value in row.items()} for row in page]


def _steps(reader: Reader) -> Rows:
    """Plans with their outcomes; every metric the learner stored as JSON, the usual ones as columns of their own."""
    for page in reader.pages(t.plan):
        low, high = min(plan["step"] for plan in page), max(plan["step"] for plan in page)
        outcomes = {(row["lineage"], row["step"]): row for row in reader.between(t.plan_outcome, "step", low, high)}
        rows = []
        for plan in page:
            outcome = outcomes.get((plan["lineage"], plan["step"]), {})
            metrics = json.loads(outcome.get("metrics_json") or "{}")
            known = {name: _number(metrics.get(name)) for name in METRICS}
            rows.append({
                **plan, **known, "planned_at": plan["planned_at_us"], "finished_at": outcome.get("finished_at_us"),
                "outcome": outcome.get("outcome"), "reason": outcome.get("reason"), "metrics_json": outcome.get("metrics_json"),
            })  # fmt: skip
        yield rows


def _samples(reader: Reader, with_tokens: bool) -> Rows:
    """Accepted samples with the step that trained them on the newest lineage that planned them."""
    for page in _timed(reader.pages(t.sample, page_rows=SAMPLES_WITH_TOKENS if with_tokens else PAGE_ROWS), "accepted_at_us"):
        first, last = page[0]["ordinal"], page[-1]["ordinal"]
        items, verdicts = _by_slot(reader, t.plan_item, first, last), _by_slot(reader, t.verdict, first, last)
        payloads = _by_slot(reader, t.payload, first, last) if with_tokens else {}
        for row in page:
            key = (row["ordinal"], row["sibling"])
            item, verdict = items.get(key, {}), verdicts.get(key, {})
            row |= {"sample_id": f"{key[0]}.{key[1]}", "step": item.get("step"), "position": item.get("pos")}
            row |= {"valid": item.get("valid"), "verdict": verdict.get("kind"), "verdict_reason": verdict.get("reason")}
            if key in payloads:
                row |= _unpacked(payloads[key])
        yield page


def _by_slot(reader: Reader, table: Any, first: int, last: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by slot; of several lineages the newest."""
    return {(row["ordinal"], row["sibling"]): row for row in reader.between(table, "ordinal", first, last)}


def _unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    mask = row["loss_mask"]
    return {"token_ids": list(unpack_i32(row["token_ids"])), "logprobs": list(unpack_f32(row["logprobs"])),
            "loss_mask": list(mask) if mask else None}  # fmt: skip


METRICS = (
    "reward_mean", "reward_std", "samples_valid", "tokens_total", "completion_tokens_mean", "loss", "grad_norm", "lr",
    "entropy_mean", "ess_token_raw_fraction", "ess_token_applied_fraction", "kl_behaviour_old_k3", "lag_head_mean",
    "lag_head_max", "lag_span_mean", "lag_span_max", "rho_max", "rejected_fraction", "clip_low_fraction",
    "clip_high_fraction", "seconds_step", "seconds_plan_wait", "seconds_fetch", "seconds_publish_before",
    "seconds_checkpoint_before",
)  # fmt: skip
"""Metrics of a step that get a column each."""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _fields(arrow: Any, **names: str) -> list[Any]:
    kinds = {"i": arrow.int64(), "f": arrow.float64(), "s": arrow.string(), "b": arrow.bool_(), "t": arrow.timestamp("us", "UTC"),
             "I": arrow.list_(arrow.int32()), "F": arrow.list_(arrow.float32()), "B": arrow.list_(arrow.uint8())}  # fmt: skip
    return [arrow.field(name, kinds[kind]) for kind, listed in names.items() for name in listed.split()]


def _step_schema(arrow: Any) -> list[Any]:
    return _fields(
        arrow, i="lineage step base_version revision n_groups n_items epoch", s="outcome reason items_digest chain_digest",
        t="planned_at finished_at", f=" ".join(METRICS),
    ) + _fields(arrow, s="metrics_json")  # fmt: skip


def _sample_schema(arrow: Any, with_tokens: bool) -> list[Any]:
    return _fields(
        arrow, s="sample_id", i="ordinal sibling lineage lease_token attempt version_min version_max n_tokens step position",
        f="reward generate_s verify_s", b="valid salvaged", t="accepted_at",
    ) + _fields(
        arrow, s="reward_status sandbox_status finish_reason blame verdict verdict_reason incarnation payload_digest",
        **({"I": "token_ids", "F": "logprobs", "B": "loss_mask"} if with_tokens else {}),
    )  # fmt: skip


def _failure_schema(arrow: Any) -> list[Any]:
    return _fields(
        arrow, i="ordinal sibling lease_token attempt n_tokens", s="incarnation status sandbox_status blame reason evidence_json",
        f="generate_s verify_s", b="final", t="reported_at",
    )  # fmt: skip


def _event_schema(arrow: Any) -> list[Any]:
    return _fields(arrow, i="seq ordinal sibling token", s="kind incarnation detail_json", t="at")
