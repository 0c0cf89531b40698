"""The Parquet files of a run: every row, readable by others, whole or not there; read beside a server that goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))

from ledger_support import Scene, run_record

from rollbook.core.errors import ConfigError, NotFound
from rollbook.core.records import Blame, FailureReport, RewardStatus
from rollbook.ledger import schema as t
from rollbook.ledger.ledger import Ledger
from rollbook.ledger.readonly import Reader
from rollbook.report.export import TABLES, export

parquet = pytest.importorskip("pyarrow.parquet", reason="PYARROW NOT INSTALLED: nothing to export with")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Ledger(f"sqlite:///{tmp_path}/ledger.sqlite", holder="server") as ledger:
        scene = Scene(ledger, run_record(steps=3))
        scene.feed(4)
        scene.fill(4)
        scene.train(1)
        grant = scene.lease(1)[0]
        ledger.report_failures(
            [FailureReport(grant.key, grant.token, scene.incarnation, RewardStatus.TIMEOUT, Blame.UNCLEAR, "slow")]
        )
        ledger.quarantine_group(3, "poison")
        scene.fill(2)
        yield scene


def reader(tmp_path: Path, run_id: str = "run") -> Reader:
    return Reader(f"sqlite:///{tmp_path}/ledger.sqlite", run_id)


def test_every_row_is_exported_while_the_server_has_the_file(scene: Scene, tmp_path: Path) -> None:
    with reader(tmp_path) as rows:
        counts = export(rows, tmp_path / "out", with_tokens=True)
    tables = {name: parquet.read_table(tmp_path / "out" / f"{name}.parquet") for name in counts}
    assert {name: table.num_rows for name, table in tables.items()} == counts
    assert counts["steps"] == 1 and counts["samples"] == 6 and counts["failures"] == 1 and counts["events"] > 8
    samples = {row["sample_id"]: row for row in tables["samples"].to_pylist()}
    trained = samples["0.1"]
    assert (trained["step"], trained["reward"], trained["valid"], trained["verdict"]) == (1, 1.0, True, None)
    assert trained["token_ids"] == [5, 6, 7] and trained["logprobs"] == [-0.5, -1.5, -2.5] and trained["loss_mask"] is None
    assert samples["2.0"]["step"] is None and trained["accepted_at"].tzinfo is not None
    (step,) = tables["steps"].to_pylist()
    assert (step["outcome"], step["reward_mean"], step["n_items"]) == ("trained", 0.25, 4)
    (failure,) = tables["failures"].to_pylist()
    assert (failure["status"], failure["blame"], failure["reason"]) == ("timeout", "unclear", "slow")
    assert b"run" in tables["steps"].schema.metadata.values()
    assert not list((tmp_path / "out").glob(".*"))


def test_pages_are_gapless_whatever_their_size(scene: Scene, tmp_path: Path) -> None:
    with reader(tmp_path) as rows:
        for table in (t.sample, t.event, t.plan_item, t.slot):
            whole = [row for page in rows.pages(table) for row in page]
            assert [row for page in rows.pages(table, page_rows=1) for row in page] == whole
            assert [row for page in rows.pages(table, page_rows=3) for row in page] == whole


def pandas_rows(library: Any, file: str) -> list[dict[str, Any]]:
    frame = library.read_parquet(file, dtype_backend="pyarrow")
    return list(frame.astype(object).where(frame.notna(), None).to_dict("records"))


def duckdb_rows(library: Any, file: str) -> list[dict[str, Any]]:
    library.sql("SET TimeZone = 'UTC'")
    found = library.sql(f"FROM '{file}'")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


OPENED = {"pandas": pandas_rows, "polars": lambda library, file: library.read_parquet(file).to_dicts(), "duckdb": duckdb_rows}


@pytest.mark.parametrize("name", sorted(OPENED))
def test_other_programs_read_the_rows_that_were_written(name: str, scene: Scene, tmp_path: Path) -> None:
    library = pytest.importorskip(name, reason=f"{name.upper()} NOT INSTALLED: it did not open the exported files")
    with reader(tmp_path) as rows:
        counts = export(rows, tmp_path / "out", with_tokens=True)
    assert set(counts) == set(TABLES)
    for table, n in counts.items():
        file = str(tmp_path / "out" / f"{table}.parquet")
        found, written = OPENED[name](library, file), parquet.read_table(file).to_pylist()
        assert len(found) == n == len(written) > 0
        for row, expected in zip(found, written, strict=True):
            assert {column: plain(value) for column, value in row.items()} == expected, (name, table)


def plain(value: Any) -> Any:
    """A cell as Python has it: arrays as lists, a library's timestamps as datetimes."""
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime()
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return value.tolist() if hasattr(value, "tolist") else value


def test_without_pyarrow_the_extra_is_named(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with reader(tmp_path) as rows, pytest.raises(ConfigError, match=r"rollbook\[export\]"):
        export(rows, tmp_path / "out")


def test_a_run_that_is_not_there_is_named_with_those_that_are(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="it holds run"):
        reader(tmp_path, "other")
    with pytest.raises(ConfigError, match="there is no ledger"):
        Reader(f"sqlite:///{tmp_path}/nowhere.sqlite", "run")


def test_reading_writes_nothing_and_needs_no_lock_with_the_server_down(scene: Scene, tmp_path: Path) -> None:
    scene.ledger.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ledger.sqlite")}
    with reader(tmp_path) as rows:
        assert rows.manifest()["revisions"][0]["revision"] == 0
        assert [event["what"] for event in rows.recoveries()].count("role_acquired") == 2
        assert rows.lost_seconds()[0]["attempts"] == 1 and rows.sample_seconds()["samples"] == 6
        with Ledger(f"sqlite:///{tmp_path}/ledger.sqlite", holder="next") as successor:
            successor.attach("run")
            assert rows.sample_seconds()["samples"] == 6
    assert before.keys() == {"ledger.sqlite"}


def test_the_file_of_a_server_that_was_killed_is_read_with_what_its_log_holds(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        (tmp_path / "killed" / name).write_bytes((tmp_path / name).read_bytes())
    with reader(tmp_path / "killed") as rows:
        assert rows.sample_seconds()["samples"] == 6
