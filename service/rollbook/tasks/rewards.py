"""Built-in rewards: functions of the extracted answer and the task.

Owns what counts as right. A reward sees the completion after ``task.completion_pattern``. A completion that fails the
format or is wrong is a real outcome, reward 0, the model's own; a broken task or scorer is an exception, never a 0 (P6).
"""

from __future__ import annotations

import re
from decimal import Decimal

from rollbook.core.ports import RewardResult

_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?")


def exact_match(completion: str, task: dict) -> RewardResult:
    """1 when the answer equals the task's ``answer`` apart from surrounding white space, else 0."""
    return RewardResult(float(completion.strip() == task["answer"].strip()))


def numeric_match(completion: str, task: dict) -> RewardResult:
    """1 when the answer is the task's number, however it is written, else 0.

    ``1,234``, ``$1234``, ``1234.`` and ``1234.00`` are one number; there is no tolerance in value.
    Raises: ValueError (the task's own answer is no number).
    """
    expected = parse_number(task["answer"])
    if expected is None:
        raise ValueError(f"the task's answer {task['answer']!r} is not a number; numeric_match cannot judge it")
    given = parse_number(completion)
    if given is None:
        return RewardResult(0.0, evidence="the answer is not a number")
    return RewardResult(float(given == expected))


def reasoning_gym_score(completion: str, task: dict) -> RewardResult:
    """The score that the task's own dataset gives the answer, in [0, 1].

    Several datasets pay a part for an answer that merely contains the right one or has its length; extract the answer with
    ``task.completion_pattern`` where that matters. Raises: ValueError (not a reasoning_gym task), whatever a broken entry
    makes the scorer raise.
    """
    from rollbook.tasks.procedural import score  # imported late: other rewards do not need the package

    if "reasoning_gym" not in task:
        raise ValueError("reasoning_gym_score judges tasks of task.source = 'reasoning_gym' only; choose another task.reward")
    value, remark = score(completion.strip(), task["reasoning_gym"])
    return RewardResult(value, evidence=remark)


def parse_number(text: str) -> Decimal | None:
    """The number ``text`` consists of: optional sign and dollar sign, thousands commas, decimals, one trailing period."""
    text = text.strip().removesuffix(".")
    sign = text[:1] if text[:1] in ("+", "-") else ""
    digits = text[len(sign) :].removeprefix("$")
    if not sign and digits[:1] in ("+", "-"):  # $-5 as well as -$5
        sign, digits = digits[0], digits[1:]
    if not digits or not _NUMBER.fullmatch(sign + digits):
        return None
    return Decimal(sign + digits.replace(",", ""))
