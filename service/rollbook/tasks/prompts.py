"""From a task to the exact token ids an engine receives.

Owns template rendering, conversations as prompts, the chat template and the length limit. Never truncates: a prompt that does
not fit is refused by name, because a cut prompt is another task. Token ids, not text, cross the wire, so nothing is tokenised
twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def read_messages(value: object, where: str) -> list[Message]:
    """A prompt that is a conversation: messages with ``role`` and ``content`` (text), the last one not the assistant's.

    Columns that hold nothing, as Parquet writes them, are left out. Raises: TaskError naming the task and the message.
    """
    if not isinstance(value, list) or not value:
        raise TaskError(f"{where}: messages must be a list of at least one message, found {value!r:.80}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise TaskError(
                f"{where}: message {number} is {message!r:.120}; write {{role = {' | '.join(ROLES)}, content = text}}"
            )
        messages.append({key: content for key, content in message.items() if content is not None})
    if messages[-1]["role"] == "assistant":
        raise TaskError(f"{where}: its last message is the assistant's, so there is nothing to answer; leave the answer out")
    return messages


def plain_text(messages: Sequence[Message]) -> str:
    """The contents of a conversation, one paragraph a message, without who said them."""
    return "\n\n".join(message["content"] for message in messages)


def prompt_of(task: Mapping[str, Any]) -> str | list[Message]:
    """What the model is asked: ``messages`` where they are the prompt, that is where ``prompt`` is their text, else ``prompt``.

    A row may have both, one as data only; a ``task.prompt_template`` other than ``{prompt}`` replaces the conversation.
    """
    prompt: str = task["prompt"]
    messages = task.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "content" in m for m in messages):
        return prompt
    texts = [message["content"] for message in messages]
    return messages if all(isinstance(t, str) for t in texts) and "\n\n".join(texts) == prompt else prompt


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

    def token_ids(self, prompt: str | Sequence[Message], where: str) -> list[int]:
        """Token ids of a prompt, text or messages (see ``prompt_of``).

        Raises: TaskError naming the task (``where``): no tokens, too many, or messages that only a chat template can render.
        """
        if self.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            # The template writes its own special tokens; adding them again would double the start of sequence.
            ids = self.tokenizer(self._rendered(messages, where), add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt if isinstance(prompt, str) else _only_message(prompt, where))["input_ids"]
        if not ids:
            raise TaskError(f"{where}: its prompt {str(prompt)[:80]!r} has no tokens, so there is nothing to continue")
        if len(ids) > self.tokens_max:
            raise TaskError(
                f"{where}: its prompt has {len(ids)} tokens, more than the {self.tokens_max} that the smallest "
                "workers.max_model_len leaves beside sampling.max_new_tokens; remove the task or raise max_model_len"
            )
        return list(ids)

    def _rendered(self, messages: list[Message], where: str) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # the template is the model's own code and raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise TaskError(f"{where}: the chat template cannot render its messages ({roles}): {error}") from error

    def encode(self, prompt: str | Sequence[Message], where: str) -> bytes:
        """Token ids as int32 little endian [n], as stored with the group. Raises TaskError like ``token_ids``."""
        return pack_i32(self.token_ids(prompt, where))


def _only_message(messages: Sequence[Message], where: str) -> str:
    """The text of a conversation of one user message: longer ones have no text without a template."""
    if len(messages) > 1 or messages[0]["role"] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise TaskError(
            f"{where}: its prompt is a conversation ({roles}), which only a chat template renders; set model.chat_template = "
            "true, or write it as text with task.prompt_template, for example '{messages[0][content]}'"
        )
    return str(messages[0]["content"])


def make_encoder(config: Config) -> PromptEncoder:
    """The encoder of a run's prompts. Raises ConfigError (no tokenizer, no chat template)."""
    tokens_max = min(w.max_model_len for w in config.workers) - config.sampling.max_new_tokens
    return PromptEncoder(load_tokenizer(config.model.path), config.model.chat_template, tokens_max)
