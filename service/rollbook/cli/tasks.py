"""`rollbook tasks validate`: look at tasks with the run's own source and judge before a run does.

Owns the flags, the table and the exit code; what is wrong with a row is ``rollbook.tasks.validation``'s. Never changes the file
it reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.cli.common import read_config
from rollbook.core.config import Config, absolute_code, config_in
from rollbook.core.environments import Episode, RewardResult, Turn
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.tables import apply_override

if TYPE_CHECKING:
    from rollbook.tasks.validation import Findings, Row

_SHOWN_MAX = 50
_FLAGS = {
    "answer_field": "task.answer_field", "answer_pattern": "task.answer_pattern", "completion_pattern": "task.completion_pattern",
    "prompt_template": "task.prompt_template", "reward": "task.reward", "environment": "environment.name",
}  # fmt: skip


def register(commands: argparse._SubParsersAction) -> None:
    """Add the commands about tasks."""
    group = commands.add_parser("tasks", help="look at tasks before a run does").add_subparsers(
        dest="tasks_command", required=True, metavar="COMMAND"
    )
    parser = group.add_parser(
        "validate", help="right answers must be paid, empty and constant ones must not; exits 1 when a row is broken"
    )
    parser.add_argument("config", metavar="FILE", help="task file (.jsonl, .parquet), configuration (.toml), or run directory")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="override one field")
    parser.add_argument("--environment", metavar="NAME", help="environment that judges, as environment.name")
    parser.add_argument("--reward", metavar="NAME", help="reward function that judges, as task.reward")
    parser.add_argument("--answer-field", metavar="NAME", help="as task.answer_field")
    parser.add_argument("--answer-pattern", metavar="REGEX", help="as task.answer_pattern")
    parser.add_argument("--completion-pattern", metavar="REGEX", help="as task.completion_pattern")
    parser.add_argument("--prompt-template", metavar="TEXT", help="as task.prompt_template")
    parser.add_argument("--completion-template", default="", metavar="TEXT",
                        help="how a completion gives an answer, for example '#### {answer}'")  # fmt: skip
    parser.add_argument("--full", type=float, default=1.0, metavar="REWARD", help="what a right answer must earn (1)")
    parser.add_argument("--split", choices=("train", "heldout"), default="train", help="which of the run's tasks (train)")
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N rows")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--write-clean", metavar="OUT.jsonl", help="write the rows that passed")
    parser.set_defaults(function=validate_tasks)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, at least 1")
    return int(text)


def validate_tasks(args: argparse.Namespace) -> int:
    """Check tasks; exit 1 when one is broken."""
    from rollbook.rollout.judges import open_judge
    from rollbook.tasks.validation import validate

    if args.completion_template and "{answer}" not in args.completion_template:
        raise ConfigError(f"--completion-template {args.completion_template!r}: write {{answer}} where the answer stands")
    with tempfile.TemporaryDirectory(prefix="rollbook-validate-") as scratch:
        config = _config(args, scratch)
        read = {Path(file).resolve() for file in (args.config, config.task.path, config.task.heldout_path) if file}
        if args.write_clean and Path(args.write_clean).resolve() in read:
            raise ConfigError(f"--write-clean {args.write_clean} is the file that is read; name another")
        rows = _Rows(config, args.completion_template)
        judge = open_judge(config).judge
        try:
            found = validate(
                islice(rows.read(args.split), args.limit), lambda pairs: _judged(judge, pairs), args.full, rows.write,
                _fitting(args, config),
            )  # fmt: skip
        finally:
            judge.close()
        if not found.total:
            raise TaskError(f"{args.config}: no {args.split} tasks")
        if args.split == "train":
            found.overlap = _overlap(config, found)
    if args.write_clean:
        _write_clean(Path(args.write_clean), found)
    _print(args, found)
    return 1 if found.broken else 0


def _config(args: argparse.Namespace, scratch: str) -> Config:
    """The run's configuration; for a task file, one made of the flags."""
    here = Path.cwd()
    given: dict[str, str] = {field: value for flag, field in _FLAGS.items() if (value := getattr(args, flag)) is not None}
    for field in ("task.reward", "environment.name"):
        if field in given:
            given[field] = absolute_code(given[field], here)
    overrides = [*args.overrides, *(f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in given.items())]
    path = Path(args.config)
    if path.suffix == ".toml" or path.is_dir():
        args.overrides = overrides
        return read_config(args)
    if not path.is_file():
        raise TaskError(f"task file {path} cannot be read: no such file")
    table: dict[str, Any] = {
        "run": {"id": "validate", "dir": scratch, "steps": 1}, "model": {"path": scratch},
        "task": {"source": "parquet" if path.suffix == ".parquet" else "jsonl", "path": str(path.resolve())},
        "learner": {"groups_per_step": 1, "group_size": 2}, "workers": [{"engine": "transformers"}],
    }  # fmt: skip
    for override in overrides:
        apply_override(table, override)
    return config_in(table, here)


@dataclass(slots=True)
class _Rows:
    """The run's rows with completions that answer them."""

    config: Config
    template: str

    def read(self, split: str) -> Iterator[Row | TaskError]:
        """Every row, or what is wrong with it. Raises TaskError, ConfigError (the source as a whole)."""
        from rollbook.tasks.sources import canonical, read_rows, shape_of

        task = self.config.task
        gold = self._environment_gold()
        path = task.path if split == "train" else task.heldout_path
        if task.source not in ("jsonl", "parquet") and (split == "train" or not path):
            yield from (self._row(name, made, made, gold) for name, made in self._indexed(split))
            return
        if not path:
            raise ConfigError("task.heldout_path is missing: there are no held-out tasks to look at")
        shape = shape_of(self.config)
        for name, raw in read_rows(path):
            if isinstance(raw, TaskError):
                yield raw
                continue
            try:
                canonical(raw, name)
                made = shape.apply(raw, name)
            except TaskError as error:
                yield error
            else:
                yield self._row(name, raw, made, gold)

    def write(self, answer: str) -> str:
        """A completion that gives an answer, as well as can be known."""
        from rollbook.tasks.validation import write_answer

        if self.template:
            return self.template.replace("{answer}", answer)
        pattern = self.config.task.completion_pattern
        written = write_answer(pattern, answer) if pattern else answer
        return answer if written is None else written

    def _indexed(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        from rollbook.tasks.sources import heldout_candidates, load_source

        source = load_source(self.config) if split == "train" else heldout_candidates(self.config)
        size = len(source) if source is not None else 0
        if split == "heldout":
            size = min(size, self.config.task.heldout_size)
        for i in range(size):
            assert source is not None
            yield source.name(i), source[i]

    def _environment_gold(self) -> Callable[[dict[str, Any]], str] | None:
        """The environment's own ``gold(task)``, where it has one: a completion that must be paid."""
        from rollbook.tasks.environment import load_environment

        if not self.config.environment.name:
            return None
        gold = getattr(load_environment(self.config).inner, "gold", None)
        return gold if callable(gold) else None

    def _row(self, name: str, raw: dict[str, Any], task: dict[str, Any], gold: Callable[[dict[str, Any]], str] | None) -> Row:
        from rollbook.tasks.sources import field_of, shape_of
        from rollbook.tasks.validation import Row, gold_completions

        row = Row(name, raw, task)
        try:
            if gold is not None:
                right: object = gold(task)
                if not isinstance(right, str):
                    raise TaskError(f"gold(task) gave a {type(right).__name__}, expected the text of a completion")
                row.golds, row.answer = [right], right
            else:
                raw_answer = field_of(raw, shape_of(self.config).answer_field)
                row.golds = gold_completions(task, raw_answer, self.config.task.completion_pattern, self.template)
                row.answer = task["answer"]
        except TaskError as error:
            row.problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - the environment's own code, whose failure is the row's
            row.problems.append(f"gold(task) raised {type(error).__name__}: {error}")
        return row


def _judged(judge: Any, pairs: Sequence[tuple[dict[str, Any], str]]) -> list[RewardResult]:
    episodes = [Episode(task, (Turn(completion),)) for task, completion in pairs]
    futures = [judge.score(episode, key=f"validate/{i}.0", seed=0) for i, episode in enumerate(episodes)]
    return [future.result() for future in futures]


def _fitting(args: argparse.Namespace, config: Config) -> Callable[[Row], None] | None:
    """Whether a row's prompt can be encoded and fits, as the feeder asks; None where no model says so."""
    from rollbook.tasks.prompts import make_encoder, prompt_of

    if not (Path(args.config).is_dir() or args.config.endswith(".toml")):
        return None
    try:
        encoder = make_encoder(config)
    except ConfigError as error:
        print(f"prompts are not looked at: {error}", file=sys.stderr)
        return None

    def check(row: Row) -> None:
        encoder.token_ids(prompt_of(row.task), row.name)

    return check


def _overlap(config: Config, found: Findings) -> list[str]:
    """Names of held-out tasks with the prompt of a training task that was looked at; a run leaves them out."""
    from rollbook.tasks.sources import heldout_candidates

    if config.task.source == "reasoning_gym" and not config.task.heldout_path:
        return []  # chosen to be others
    candidates = heldout_candidates(config)
    trained = {row.task["prompt"] for row in found.rows}
    indices = range(len(candidates)) if candidates is not None else ()
    return [candidates.name(i) for i in indices if candidates is not None and candidates[i]["prompt"] in trained]


def _write_clean(path: Path, found: Findings) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text("".join(json.dumps(row.raw, ensure_ascii=False) + "\n" for row in found.passed))
    scratch.replace(path)


def _print(args: argparse.Namespace, found: Findings) -> None:
    if args.json:
        content = {
            "rows": found.total, "passed": len(found.passed), "broken": [{"row": n, "reason": r} for n, r in found.broken],
            "constants": [{"completion": j.completion, "judged": j.judged, "paid": j.paid, "mean": j.mean} for j in found.junk],
            "repeats": found.repeats, "duplicates": found.duplicates, "heldout_overlap": found.overlap,
        }  # fmt: skip
        print(json.dumps(content, ensure_ascii=False))
        return
    for name, reason in found.broken[:_SHOWN_MAX]:
        print(f"{name}: {reason}" if name else reason)
    if len(found.broken) > _SHOWN_MAX:
        print(f"… and {len(found.broken) - _SHOWN_MAX} more; --json lists them")
    for junk in found.junk:
        shown = repr(junk.completion) if len(junk.completion) <= 40 else f"{junk.completion[:37]!r}…"
        print(f"constant answer {shown}: paid in full {junk.paid} of {junk.judged} times, {junk.mean:.3g} on average")
    if found.repeats:
        print(f"repeated rows: {found.repeats}")
    for first, second in found.duplicates[:_SHOWN_MAX]:
        print(f"one prompt, two answers: {first} and {second}")
    if found.overlap:
        print(f"held-out tasks that are trained on, which a run leaves out: {len(found.overlap)}, the first {found.overlap[0]}")
    n_broken = found.total - len(found.passed)
    print(f"{found.total} rows: {len(found.passed)} passed, {n_broken} broken"
          + (f"; {len(found.passed)} written to {args.write_clean}" if args.write_clean else ""))  # fmt: skip
    if found.rows and all(any("its right answer" in text for text in row.problems) for row in found.rows):
        print("not one right answer is paid: if completions give answers in a form, say so with --completion-template")
