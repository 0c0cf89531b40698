"""Task sources: an indexed, unchanging list of tasks with an identity.

Owns reading task files, the shape every task has afterwards (``prompt`` and ``answer`` as text, ``messages`` where the prompt is
a conversation, the other fields kept, everything JSON-able) and the choice of held-out tasks. Never shuffles (``stream.py``) and
never tokenises (``prompts.py``). A file is read and checked whole at start, so that a broken line stops a run before its first
step. Upholds P12: ``digest`` goes into the run's manifest and into the feeder's cursor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rollbook.core.config import Config, TaskConfig, split_adapter
from rollbook.core.errors import TaskError
from rollbook.core.idempotency import digest
from rollbook.tasks.extract import check_pattern, extract
from rollbook.tasks.prompts import plain_text, read_messages, render_prompt

log = logging.getLogger(__name__)


class TaskSource(Protocol):
    """An indexed list of tasks; the same index gives an equal task in every process that opens the source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict:
        """A task: at least ``prompt`` (str) and, where a reward judges it, ``answer`` (str); JSON-able."""
        ...

    def name(self, index: int) -> str:
        """Where the task comes from, for messages: ``train.jsonl line 17``."""
        ...

    def digest(self) -> str:
        """sha256 hex of the content."""
        ...


@dataclass(frozen=True, slots=True)
class TaskShape:
    """How a raw row becomes a task."""

    prompt_template: str = "{prompt}"
    answer_field: str = "answer"
    """Dots lead into tables: ``reward_model.ground_truth``."""
    answer_pattern: str = ""
    needs_answer: bool = True
    """False: an environment judges, and may do so without one."""

    @classmethod
    def of(cls, task: TaskConfig) -> TaskShape:
        """The shape a configuration asks for. Raises ConfigError (bad pattern)."""
        if task.answer_pattern:
            check_pattern(task.answer_pattern, "task.answer_pattern")
        return cls(task.prompt_template, task.answer_field, task.answer_pattern)

    def apply(self, row: dict, where: str) -> dict:
        """The task of ``row``: its fields, with ``prompt`` rendered and ``answer`` extracted.

        A ``prompt`` that is a list, or ``messages`` without a ``prompt``, is a conversation: the task has it as ``messages``
        and its text as ``prompt``. Raises: TaskError naming ``where`` and the missing or unmatched field.
        """
        answer = self._answer(row, where)
        conversation = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
        task = {key: value for key, value in row.items() if key != "prompt" or value is not None}
        if isinstance(conversation, list):
            task["messages"] = read_messages(conversation, where)
            task["prompt"] = plain_text(task["messages"])
        task["prompt"] = render_prompt(self.prompt_template, task, where)
        return task if answer is None else task | {"answer": answer}

    def _answer(self, row: dict, where: str) -> str | None:
        value = field_of(row, self.answer_field)
        if value is None:
            if not self.needs_answer:
                return None
            raise TaskError(f"{where}: no answer in field {self.answer_field!r} (task.answer_field); "
                            f"its fields are {', '.join(sorted(row)) or 'none'}")  # fmt: skip
        answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.answer_pattern:
            found = extract(self.answer_pattern, answer)
            if found is None:
                raise TaskError(f"{where}: task.answer_pattern = {self.answer_pattern!r} does not match its "
                                f"{self.answer_field} {answer[-80:]!r}")  # fmt: skip
            answer = found.strip()
        return answer


def shape_of(config: Config) -> TaskShape:
    """The shape of a run's task files: verl's rows keep the answer where verl looks for it. Raises ConfigError (bad pattern)."""
    shape = TaskShape.of(config.task)
    if not config.environment.name:
        return shape
    field = "reward_model.ground_truth" if split_adapter(config.environment.name)[0] == "verl" else shape.answer_field
    return replace(shape, needs_answer=False, answer_field=field if shape.answer_field == "answer" else shape.answer_field)


def field_of(row: Mapping[str, Any], path: str) -> Any:
    """The value under a dotted name, a field whose own name has dots first; None where there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class ListedTasks:
    """Tasks held in memory."""

    def __init__(self, tasks: Sequence[dict], names: Sequence[str], content_digest: str) -> None:
        self._tasks = tasks
        self._names = names
        self._digest = content_digest

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict:
        return self._tasks[index]

    def name(self, index: int) -> str:
        return self._names[index]

    def digest(self) -> str:
        return self._digest


def read_jsonl(path: str | Path, shape: TaskShape) -> ListedTasks:
    """Tasks of a JSON-lines file, one object a line; blank lines are skipped.

    Raises: TaskError naming file and line: unreadable, not UTF-8, not a JSON object, a field missing, or no task at all.
    """
    return _listed(Path(path), _jsonl_rows(Path(path)), shape)


def read_parquet(path: str | Path, shape: TaskShape) -> ListedTasks:
    """Tasks of a Parquet file, one a row. Raises TaskError naming file and row (see ``read_jsonl``)."""
    return _listed(Path(path), _parquet_rows(Path(path)), shape)


def read_rows(path: str | Path) -> Iterator[tuple[str, dict | TaskError]]:
    """Every row of a task file with its name, Parquet by its suffix; for a row that cannot be read, what is wrong with it.

    Raises: TaskError (the file itself cannot be read).
    """
    return _parquet_rows(Path(path)) if str(path).endswith(".parquet") else _jsonl_rows(Path(path))


def _listed(path: Path, rows: Iterator[tuple[str, dict | TaskError]], shape: TaskShape) -> ListedTasks:
    tasks: list[dict] = []
    names: list[str] = []
    contents: list[bytes] = []
    for name, row in rows:
        if isinstance(row, TaskError):
            raise row
        contents.append(canonical(row, name))
        tasks.append(shape.apply(row, name))
        names.append(name)
    if not tasks:
        raise TaskError(f"{path} holds no tasks")
    return ListedTasks(tasks, names, digest("tasks", *contents))


def canonical(row: dict, where: str) -> bytes:
    """Canonical bytes of a row: the same wherever it came from. Raises TaskError naming ``where``."""
    try:
        return json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # ValueError: not a number, or a lone surrogate
        raise TaskError(f"{where}: cannot be stored as JSON text: {error}") from None


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict | TaskError]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                name = f"{path} line {number}"
                try:
                    text = _decode(line, name)
                    row: dict | TaskError | None = _parse(text, name) if text.strip() else None
                except TaskError as error:
                    row = error
                if row is not None:
                    yield name, row
    except OSError as error:
        raise TaskError(f"task file {path} cannot be read: {error.strerror}") from None


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None


def _parse(text: str, where: str) -> dict:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        row = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: expected a JSON object with the task's fields, found {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict | TaskError]]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise TaskError("task.source = 'parquet' needs pyarrow: pip install 'rollbook[tasks]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except OSError as error:
        raise TaskError(f"task file {path} cannot be read: {error}") from None
    except pyarrow.ArrowException as error:
        raise TaskError(f"{path} is not a readable Parquet file: {error}") from None


def load_source(config: Config) -> TaskSource:
    """The run's training tasks. Raises TaskError (file, environment), ConfigError (settings)."""
    shape = shape_of(config)
    if config.task.source == "environment":
        return _of_environment(config, "train")
    if config.task.source == "reasoning_gym":
        from rollbook.tasks.procedural import ProceduralTasks, training_seed

        return ProceduralTasks(config.task.name, config.task.settings, training_seed(config.run.seed), config.task.size, shape)
    return _read_file(config.task.path, shape, parquet=config.task.source == "parquet")


def load_heldout(config: Config, training: TaskSource) -> TaskSource | None:
    """Tasks for evaluation, at most ``task.heldout_size``, none of which has the prompt of a training task.

    From ``heldout_path`` (first tasks in file order; Parquet by its suffix), else from the environment's held-out tasks or a
    procedural source under seeds disjoint from training; None where a file source names no held-out file and where an
    environment has no held-out tasks.

    Raises: TaskError (unreadable, or every candidate is a training task).
    """
    task = config.task
    candidates = heldout_candidates(config)
    if candidates is None:
        return None
    return _disjoint(candidates, training, task.heldout_size, repeats=bool(task.heldout_path) or task.source == "environment")


def heldout_candidates(config: Config) -> TaskSource | None:
    """What held-out tasks are chosen from (see ``load_heldout``), training tasks among it. Raises TaskError, ConfigError."""
    task = config.task
    shape = shape_of(config)
    if task.heldout_path:
        return _read_file(task.heldout_path, shape, parquet=task.heldout_path.endswith(".parquet"))
    if task.source == "environment":
        brought = _of_environment(config, "heldout")
        return brought if len(brought) else None
    if task.source == "reasoning_gym":
        from rollbook.tasks.procedural import ProceduralTasks, heldout_seed

        tries = max(20 * task.heldout_size, 1000)
        return ProceduralTasks(task.name, task.settings, heldout_seed(config.run.seed), tries, shape)
    return None


def _of_environment(config: Config, split: str) -> ListedTasks:
    """Tasks that the run's environment brings; only the held-out ones may be none. Raises TaskError, ConfigError."""
    from rollbook.tasks.environment_tasks import read_tasks  # other sources need no process

    rows = read_tasks(config, split)
    if not rows and split == "train":
        raise TaskError(f"environment.name = {config.environment.name!r}: load('train') gives no tasks")
    shown = f"{config.environment.name} {split} task"
    names = [f"{shown} {number}" for number in range(1, len(rows) + 1)]
    template = config.task.prompt_template
    tasks = [row | {"prompt": render_prompt(template, row, name)} for row, name in zip(rows, names, strict=True)]
    return ListedTasks(tasks, names, digest("tasks", *map(canonical, rows, names)))


def _read_file(path: str, shape: TaskShape, *, parquet: bool) -> ListedTasks:
    return read_parquet(path, shape) if parquet else read_jsonl(path, shape)


def _disjoint(candidates: TaskSource, training: TaskSource, size: int, *, repeats: bool) -> ListedTasks:
    """The first ``size`` candidates that are not trained on; without ``repeats`` each prompt once."""
    seen = {training[i]["prompt"] for i in range(len(training))}
    tasks: list[dict] = []
    names: list[str] = []
    n_trained = 0
    for i in range(len(candidates)):
        if len(tasks) == size:
            break
        task = candidates[i]
        if task["prompt"] in seen:
            n_trained += 1
            continue
        if not repeats:
            seen.add(task["prompt"])
        tasks.append(task)
        names.append(candidates.name(i))
    if not tasks:
        raise TaskError(f"all {n_trained} held-out candidates (from {candidates.name(0)}) repeat prompts of the training tasks: "
                        "give task.heldout_path another file, or the procedural source a larger range")  # fmt: skip
    if n_trained or len(tasks) < size:
        log.warning("held-out tasks: %d of %d wanted; %d candidates left out because their prompts are trained on or repeated",
                    len(tasks), size, n_trained, extra={"event": "heldout_reduced"})  # fmt: skip
    contents = [canonical(task, name) for task, name in zip(tasks, names, strict=True)]
    return ListedTasks(tasks, names, digest("tasks", *contents))
