"""From sampled token ids to a reward, or to the reason why there is none.

Owns decoding and the guard around the run's verifier (``tasks.verifier``, which owns extraction and the rule what a
result means). Never invents a value: whatever goes wrong in a verifier is a status, not a number (P6).
"""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable, Sequence

from rollbook.core.config import Config
from rollbook.core.errors import VerifierError
from rollbook.core.packing import unpack_i32
from rollbook.core.ports import RewardResult
from rollbook.core.records import RewardStatus
from rollbook.tasks.tokenizer import load_tokenizer
from rollbook.tasks.verifier import make_verifier

_REASON_CHARS_MAX = 2000

Judge = Callable[[bytes, str], RewardResult]
"""(completion token ids int32 LE, task JSON) to a result; never raises what a reward function raised."""


def make_decoder(model_dir: str) -> Callable[[Sequence[int]], str]:
    """Function from completion token ids to the text a verifier sees: without special tokens, end of sequence included."""
    tokenizer = load_tokenizer(model_dir)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return decode


def make_judge(config: Config) -> Judge:
    """The judge of a run's completions.

    Raises: ConfigError (no such reward function, bad pattern, no tokenizer).
    """
    verify = make_verifier(config)
    decode = make_decoder(config.model.path)

    def judge(token_ids: bytes, task_json: str) -> RewardResult:
        try:
            result = verify(decode(unpack_i32(token_ids)), json.loads(task_json))
        except VerifierError as error:
            return RewardResult(None, RewardStatus.VERIFIER_ERROR, _last_line(error))
        return dataclasses.replace(result, evidence=result.evidence[:_REASON_CHARS_MAX])

    return judge


def _last_line(error: VerifierError) -> str:
    cause = error.__cause__
    if cause is None:
        return str(error)[:_REASON_CHARS_MAX]
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{error}{place}"[:_REASON_CHARS_MAX]
