"""Verdicts about model-written programs: inputs go in, values come back as JSON, and the comparison stands outside.

Owns two protocols. ``functions``: the expected values never enter a sandbox. ``asserts``: tests run in a sandbox of their own
that calls the candidate in another one, through this process. Exit codes, printed markers, pickles and ``repr`` are never a
verdict.
"""

from rollbook.tasks.verdicts.asserts import judge_asserts
from rollbook.tasks.verdicts.functions import Case, judge_functions
from rollbook.tasks.verdicts.verdict import Verdict

__all__ = ["Case", "Verdict", "judge_asserts", "judge_functions"]
