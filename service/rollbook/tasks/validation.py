"""Checking task rows with the run's own judge before a run: right answers must be paid, empty and constant ones must not.

Owns what is wrong with a row and how a completion that gives the right answer is written. Never judges by itself: ``judge`` is
the run's. A row is broken where it cannot become a task, where its gold answer is not paid in full, where an empty or a constant
answer is, where judging fails, or where a task with the same prompt is paid for another answer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.core.environments import RewardResult
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.records import RewardStatus
from rollbook.tasks.extract import extract
from rollbook.tasks.prompts import prompt_of
from rollbook.tasks.rewards import parse_number

Judge = Callable[[Sequence[tuple[dict[str, Any], str]]], list[RewardResult]]
"""Judges (task, completion) pairs, in their order."""

_CHUNK = 256


@dataclass(slots=True)
class Row:
    """A row of a task source on its way through the checks."""

    name: str
    raw: dict[str, Any]
    """As it stands in the file, for a file of the rows that passed."""
    task: dict[str, Any]
    answer: str = ""
    """The right answer as rows are compared by it."""
    golds: list[str] = field(default_factory=list)
    """Completions that give it; one of them must be paid."""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Junk:
    """A constant answer, and what it earns over all tasks it does not answer."""

    answer: str
    completion: str
    judged: int = 0
    paid: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.judged if self.judged else 0.0


@dataclass(slots=True)
class Findings:
    """What the checks have found; ``broken`` and ``rows`` are in the source's order."""

    rows: list[Row] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Rows that never became tasks; each message begins with its name."""
    junk: list[Junk] = field(default_factory=list)
    repeats: int = 0
    """Rows whose prompt and answer stand further up already."""
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    """Names of two rows with one prompt and different answers."""
    overlap: list[str] = field(default_factory=list)
    """Held-out tasks whose prompts are trained on."""

    @property
    def total(self) -> int:
        return len(self.rows) + len(self.unreadable)

    @property
    def passed(self) -> list[Row]:
        return [row for row in self.rows if not row.problems]

    @property
    def broken(self) -> list[tuple[str, str]]:
        """(name of the row, or nothing where the reason begins with it; reason), one for each problem."""
        return [("", text) for text in self.unreadable] + [(row.name, text) for row in self.rows for text in row.problems]


def gold_completions(task: dict[str, Any], raw_answer: object, pattern: str, template: str) -> list[str]:
    """Completions that say the task's answer so that ``pattern`` finds it.

    Args:
        raw_answer: the answer field as it stands in the row, before ``task.answer_pattern``.
        pattern: ``task.completion_pattern``; empty where the judge sees the whole completion.
        template: how an answer is written, ``"#### {answer}"``; empty to find out.

    Raises: TaskError (no answer, or no completion could be made in which the pattern finds it).
    """
    answer = task.get("answer")
    if not isinstance(answer, str):
        raise TaskError("it has no answer, so nothing is known that the judge must pay")
    if template:
        return [template.replace("{answer}", answer)]
    raw = raw_answer if isinstance(raw_answer, str) else answer
    if not pattern:
        return list(dict.fromkeys([answer, raw]))
    written = write_answer(pattern, answer)
    candidates = [text for text in (raw, written, answer) if text is not None]
    found = [text for text in candidates if (extract(pattern, text) or "").strip() == answer.strip()]
    if not found:
        raise TaskError(f"no completion could be written in which task.completion_pattern = {pattern!r} finds its answer "
                        f"{answer[:80]!r}; say how with --completion-template '... {{answer}}'")  # fmt: skip
    return list(dict.fromkeys(found))


def write_answer(pattern: str, answer: str) -> str | None:
    """The shortest text that ``pattern`` matches with ``answer`` as its first group; None where the pattern is too involved."""
    written = []
    parser = re._parser  # type: ignore[attr-defined]  # the parser of re itself: no second grammar of patterns
    for kind, value in parser.parse(pattern):
        piece = _shortest(str(kind), value, answer)
        if piece is None:
            return None
        written.append(piece)
    return "".join(written)


def _shortest(kind: str, value: Any, answer: str) -> str | None:
    if kind == "LITERAL":
        return chr(value)
    if kind == "AT":
        return ""
    if kind == "SUBPATTERN":
        if value[0] == 1:
            return answer
        pieces = [_shortest(str(k), v, answer) for k, v in value[3]]
        return None if None in pieces else "".join(p for p in pieces if p)
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, _, inner = value
        pieces = [_shortest(str(k), v, answer) for k, v in inner] if least else []
        return None if None in pieces else "".join(p for p in pieces if p) * least
    if kind == "IN":
        return " " if any(str(v) == "CATEGORY_SPACE" for _, v in value) else _first_literal(value)
    if kind == "BRANCH":
        pieces = [_shortest(str(k), v, answer) for k, v in value[1][0]]
        return None if None in pieces else "".join(p for p in pieces if p)
    return None


def _first_literal(options: Sequence[tuple[Any, Any]]) -> str | None:
    return next((chr(value) for kind, value in options if str(kind) == "LITERAL"), None)


def validate(
    rows: Iterable[Row | TaskError], judge: Judge, full: float, write: Callable[[str], str],
    check: Callable[[Row], None] | None = None,
) -> Findings:  # fmt: skip
    """Check every row.

    Args:
        write: the completion that gives an answer.
        rows: the rows, or what is wrong with those that are none.
        full: the reward that a right answer must earn and a constant one must not.
        check: a further check of a row, which raises what is wrong with it; for example whether its prompt fits.

    Raises: whatever ``judge`` raises.
    """
    findings = Findings()
    for row in rows:
        if isinstance(row, TaskError):
            findings.unreadable.append(str(row))
            continue
        findings.rows.append(row)
        if check is not None:
            try:
                check(row)
            except (TaskError, ConfigError) as error:
                row.problems.append(str(error).removeprefix(f"{row.name}: "))
    for chunk in _chunks([row for row in findings.rows if row.golds]):
        _check_gold(chunk, judge, full)
    findings.junk = [Junk(answer, write(answer) if answer else "") for answer in _constants(findings.rows)]
    for junk in findings.junk:
        for chunk in _chunks([row for row in findings.rows if not _answers(junk.answer, row)]):
            _check_junk(chunk, junk, judge, full)
    _check_duplicates(findings, judge, full)
    return findings


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for begin in range(0, len(rows), _CHUNK):
        yield rows[begin : begin + _CHUNK]


def _check_gold(rows: Sequence[Row], judge: Judge, full: float) -> None:
    """One of a row's right completions must earn ``full``; the first one's result is told where none does."""
    first = judge([(row.task, row.golds[0]) for row in rows])
    again = [(row, gold) for row, result in zip(rows, first, strict=True) if not _pays(result, full) for gold in row.golds[1:]]
    others = judge([(row.task, gold) for row, gold in again]) if again else []
    paid = {id(row) for (row, _), result in zip(again, others, strict=True) if _pays(result, full)}
    for row, result in zip(rows, first, strict=True):
        if not _pays(result, full) and id(row) not in paid:
            row.problems.append(f"its right answer {_shown(row.golds[0])} {_told(result, full)}")


def _check_junk(rows: Sequence[Row], junk: Junk, judge: Judge, full: float) -> None:
    for row, result in zip(rows, judge([(row.task, junk.completion) for row in rows]), strict=True):
        if result.value is None:
            if result.status is not RewardStatus.NO_VERDICT:  # abstaining is an answer, breaking down is not
                row.problems.append(f"the answer {_shown(junk.completion)} {_told(result, full)}")
            continue
        junk.judged += 1
        junk.total += result.value
        if _pays(result, full):
            junk.paid += 1
            row.problems.append(f"the answer {_shown(junk.completion)} is paid {result.value:g}")


def _check_duplicates(findings: Findings, judge: Judge, full: float) -> None:
    """Rows with one prompt: repeats are counted; another answer breaks both rows unless the judge pays each for the other's."""
    by_prompt: defaultdict[str, list[Row]] = defaultdict(list)
    for row in findings.rows:
        by_prompt[repr(prompt_of(row.task))].append(row)
    pairs = []
    for same in by_prompt.values():
        first = same[0]
        for row in same[1:]:
            if row.answer == first.answer:
                findings.repeats += 1
            else:
                findings.duplicates.append((first.name, row.name))
                pairs.append((first, row))
    judgeable = [(a, b) for a, b in pairs if a.golds and b.golds]
    results = judge([(a.task, b.golds[0]) for a, b in judgeable]) if judgeable else []
    for (first, row), result in zip(judgeable, results, strict=True):
        if not _pays(result, full):
            row.problems.append(f"it has the prompt of {first.name} and another answer")
            first.problems.append(f"{row.name} has its prompt and another answer")


def _constants(rows: Sequence[Row]) -> list[str]:
    """Answers that must not be paid: nothing, 0, and the right answers of most rows where they are those of several.

    Two, because the most frequent one says nothing about the rows that it answers.
    """
    common = Counter(row.answer for row in rows if row.answer).most_common(2)
    return list(dict.fromkeys(["", "0", *(text for text, count in common if count > 1)]))


def _answers(text: str, row: Row) -> bool:
    """Whether a constant happens to be this row's answer, however it is written."""
    if not row.golds:  # what answers it is not known
        return bool(text)
    value = parse_number(text)
    return text.strip() == row.answer.strip() or (value is not None and parse_number(row.answer) == value)


def _pays(result: RewardResult, full: float) -> bool:
    return result.value is not None and result.value >= full


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _told(result: RewardResult, full: float) -> str:
    if result.value is None:
        return f"cannot be judged: {result.status.value}: {result.evidence[:300]}"
    evidence = f" ({result.evidence[:200]})" if result.evidence else ""
    return f"is paid {result.value:g}, not {full:g}{evidence}"

