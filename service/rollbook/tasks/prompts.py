"""From a task to the exact token ids an engine receives.

Owns template rendering, the chat template and the length limit. Never truncates: a prompt that does not fit is refused
by name, because a cut prompt is another task. Token ids, not text, cross the wire, so nothing is tokenised twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, TaskError
from rollbook.core.packing import pack_i32
from rollbook.tasks.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_prompt(template: str, fields: Mapping[str, object], where: str) -> str:
    """The prompt text: ``template`` with the task's fields in braces; ``{{`` and ``}}`` are literal braces.

    Raises: TaskError naming the missing field, the template and the task (``where``).
    """
    try:
        return template.format_map(fields)
    except (KeyError, AttributeError, TypeError) as error:
        missing = error.args[0] if isinstance(error, KeyError) else error
        raise TaskError(
            f"{where}: task.prompt_template = {template!r} asks for {missing!r}, which the task does not have; "
            f"its fields are {', '.join(sorted(fields))}"
        ) from None
    except (ValueError, IndexError) as error:
        raise TaskError(
            f"task.prompt_template = {template!r} is malformed ({error}): write {{FIELD}} for a field of the task "
            "and double every other brace"
        ) from None


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Turns prompt text into token ids, the same way for training and evaluation."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: bool
    """Wrap the prompt as one user message and open the assistant's turn."""
    tokens_max: int
    """Longest prompt that leaves room for ``sampling.max_new_tokens`` in every worker's ``max_model_len``."""

    def __post_init__(self) -> None:
        if self.chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("model.chat_template = true, but the tokenizer of model.path has no chat template")

    def token_ids(self, prompt: str, where: str) -> list[int]:
        """Token ids of the prompt. Raises TaskError naming the task (``where``) when there are none or too many."""
        if self.chat_template:
            message = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            # The template writes its own special tokens; adding them again would double the start of sequence.
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise TaskError(f"{where}: its prompt {prompt[:80]!r} has no tokens, so there is nothing to continue")
        if len(ids) > self.tokens_max:
            raise TaskError(
                f"{where}: its prompt has {len(ids)} tokens, more than the {self.tokens_max} that the smallest "
                "workers.max_model_len leaves beside sampling.max_new_tokens; remove the task or raise max_model_len"
            )
        return ids

    def encode(self, prompt: str, where: str) -> bytes:
        """Token ids as int32 little endian [n], as stored with the group. Raises TaskError like ``token_ids``."""
        return pack_i32(self.token_ids(prompt, where))


def make_encoder(config: Config) -> PromptEncoder:
    """The encoder of a run's prompts. Raises ConfigError (no tokenizer, no chat template)."""
    tokens_max = min(w.max_model_len for w in config.workers) - config.sampling.max_new_tokens
    return PromptEncoder(load_tokenizer(config.model.path), config.model.chat_template, tokens_max)
