"""Between token ids and text at the borders of turns: decoding what was sampled, encoding what a tool answered.

Owns both directions, so that training, evaluation and regeneration cut a trajectory in the same places. Sampled ids are never
decoded and encoded again: only a tool's answer, with the template's words around it, is encoded, and those ids are masked
from the loss. A turn ends where the model says end of sequence, which stays part of the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError
from rollbook.tasks.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "rollbook-marks-this"


class TurnCodec:
    """Text of one model directory's turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: bool) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template

    def decode(self, token_ids: Sequence[int]) -> str:
        """What environment and reward see of sampled ids: without special tokens."""
        ids = list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def reply_ids(self, text: str) -> list[int]:
        """Ids between the model's end of turn and its next turn, for a tool's answer.

        Raises: ConfigError (the chat template cannot show a tool's answer).
        """
        between = self._from_template(text) if self._chat_template else text
        # A program may print half of a surrogate pair, which no tokenizer takes.
        between = between.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return list(self._tokenizer(between, add_special_tokens=False)["input_ids"]) if between else []

    def _from_template(self, text: str) -> str:
        """What the chat template writes after the assistant's end of turn, up to where the assistant goes on."""
        said = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
        for role in ("tool", "user"):  # older templates know no tool role
            try:
                before = self._render(said, False)
                after = self._render([*said, {"role": role, "content": text}], True)
            except Exception:  # noqa: BLE001 - a template raises what it likes for a role it does not know
                continue
            end = str(self._tokenizer.eos_token or "")
            cut = before.rfind(end) + len(end) if end and end in before else len(before)
            if after.startswith(before[:cut]) and text in after[cut:]:
                return after[cut:]
        raise ConfigError(
            "model.chat_template = true, but the tokenizer's chat template does not show a 'tool' or 'user' message after "
            "an assistant's turn; use a model whose template does, or chat_template = false with the environment's render()"
        )

    def _render(self, messages: list[dict[str, str]], open_turn: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))


def make_codec(config: Config) -> TurnCodec:
    """The codec of a run. Raises ConfigError (no tokenizer)."""
    return TurnCodec(load_tokenizer(config.model.path), config.model.chat_template)
