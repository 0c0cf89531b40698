"""The tiny causal language model that learns to sort digits within a minute of reinforcement learning on a CPU.

Owns its architecture, byte-level tokenizer, task prompts and supervised warm start. The warm start demonstrates
"sort 4-8 digits", and a share of the demonstrations makes one systematic mistake: descending order. The model
therefore starts with two habits, and reinforcement learning chiefly chooses the right one, then sharpens it.
Never does reinforcement learning, and is used by no role at run time: to them it is an ordinary model directory.

Upholds P12 (reproducible): one thread, deterministic algorithms and seeded draws make the directory the same
bit for bit on the same machine and package versions.
"""

from __future__ import annotations

import json
import os
import random
import string
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rollbook.core.errors import ConfigError
from rollbook.learner.model_dir import new_model_directory, write_made_record

PAD_ID = 256
EOS_ID = 257
VOCAB_SIZE = 272
HEAD_SIZE = 32
CONTEXT_TOKENS_MAX = 512

TRAIN_FILE = "train.jsonl"
HELDOUT_FILE = "heldout.jsonl"

DIGITS_MIN, DIGITS_MAX = 4, 8
ANSWER_TOKENS_MAX = DIGITS_MAX + 1

# Percentiles of the prompt hash, half-open. One prompt has one hash, so no two splits can share a prompt.
SPLITS = {"heldout": (0, 10), "demonstration": (10, 50), "train": (50, 100)}

# The prompt files are the same for every model seed, so that seeds are compared on the same tasks.
_TRAIN_FILE_SEED = 11
_HELDOUT_FILE_SEED = 7
_SAMPLED_ACCURACY_SEED = 1234
# Added to the model seed, so that no seed draws its demonstrations as the prompt files were drawn.
DEMONSTRATION_SEED = 1000

BATCH_SIZE = 256
_LEARNING_RATE = 2e-3
_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.01
_GRADIENT_NORM_MAX = 1.0
_LR_RISE_STEPS = 50
_LR_FALL_SHARE = 0.3
NO_LABEL = -100


@dataclass(frozen=True)
class SortTask:
    """One prompt and its only right answer."""

    prompt: str
    answer: str


def make_tiny_model(
    out_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    steps: int = 150,
    hidden: int = 128,
    layers: int = 2,
    mistake_share: float = 0.6,
    train_prompts: int = 4096,
    heldout_prompts: int = 500,
    report_loss: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Make the tiny model, warm-start it, and write it with its task files as a Hugging Face directory.

    Writes config, fp32 safetensors, tokenizer, `train.jsonl`, `heldout.jsonl` and `made.json`. At the defaults the
    weights have 363,904 parameters and the making takes about a minute on one CPU thread.

    Args:
        out_dir: a new or empty directory.
        seed: of the initial weights and of the drawn demonstrations.
        steps: optimizer steps of the warm start, 256 demonstrations each.
        hidden: model width, a multiple of 32.
        layers: transformer blocks.
        mistake_share: share of demonstrations in descending order, 0 to 1.
        train_prompts: distinct prompts for reinforcement learning in `train.jsonl`.
        heldout_prompts: distinct prompts in `heldout.jsonl`, on which the accuracies in `made.json` are measured.
        report_loss: called after each step with the step number, from 1, and its loss in nats per token.

    Returns:
        The content of `made.json`.

    Raises:
        ConfigError: a value is out of its range, or `out_dir` has content.
    """
    _check_arguments(steps, hidden, layers, mistake_share, train_prompts, heldout_prompts)
    with new_model_directory(out_dir) as directory, deterministic_on_one_thread(seed):
        train = draw_tasks("train", train_prompts, random.Random(_TRAIN_FILE_SEED))
        heldout = draw_tasks("heldout", heldout_prompts, random.Random(_HELDOUT_FILE_SEED))
        _write_tasks(directory / TRAIN_FILE, train)
        _write_tasks(directory / HELDOUT_FILE, heldout)
        model = new_tiny_network(hidden, layers)
        loss = warm_start(model, _demonstrations(random.Random(DEMONSTRATION_SEED + seed), mistake_share), steps, report_loss)
        model.save_pretrained(directory)
        build_byte_tokenizer().save_pretrained(directory)
        record = {
            "command": f"rollbook model tiny DIR --seed {seed} --steps {steps} --hidden {hidden}",
            "seed": seed,
            "steps": steps,
            "hidden": hidden,
            "layers": layers,
            "mistake_share": mistake_share,
            "train_prompts": train_prompts,
            "heldout_prompts": heldout_prompts,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "final_loss": round(loss, 4),
            "heldout_accuracy": {
                "greedy": measure_accuracy(model, heldout),
                "sampled": measure_accuracy(model, heldout, sampling_seed=_SAMPLED_ACCURACY_SEED),
            },
        }
        return write_made_record(directory, record, ("torch", "transformers", "tokenizers"))


def _check_arguments(
    steps: int, hidden: int, layers: int, mistake_share: float, train_prompts: int, heldout_prompts: int
) -> None:
    counts = {"steps": steps, "layers": layers, "train_prompts": train_prompts, "heldout_prompts": heldout_prompts}
    check_counts(hidden, counts)
    if not 0.0 <= mistake_share <= 1.0:
        raise ConfigError(f"mistake_share={mistake_share}: give a share from 0 to 1")


def check_counts(hidden: int, counts: dict[str, int]) -> None:
    """Refuse a width that the heads do not fill, and counts below 1, by name. Raises: ConfigError."""
    if hidden < HEAD_SIZE or hidden % HEAD_SIZE:
        raise ConfigError(f"hidden={hidden}: give a positive multiple of {HEAD_SIZE}, the size of one attention head")
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: give at least 1")


def split_of(prompt: str) -> str:
    """Return the one split that `prompt` belongs to: a function of its text alone."""
    percentile = zlib.crc32(prompt.encode()) % 100
    return next(split for split, (low, high) in SPLITS.items() if low <= percentile < high)


def _random_tasks(split: str, rng: random.Random) -> Iterator[SortTask]:
    while True:
        digits = "".join(rng.choice(string.digits) for _ in range(rng.randint(DIGITS_MIN, DIGITS_MAX)))
        task = SortTask(prompt=f"sort {digits}:", answer="".join(sorted(digits)))
        if split_of(task.prompt) == split:
            yield task


def draw_tasks(split: str, count: int, rng: random.Random) -> list[SortTask]:
    """Return `count` tasks of one split with distinct prompts.

    Raises:
        ConfigError: `count` is more than a tenth of what the split holds, where drawing distinct ones gets slow.
    """
    low, high = SPLITS[split]
    held = (high - low) * sum(10**length for length in range(DIGITS_MIN, DIGITS_MAX + 1)) // 100
    if count > held // 10:
        raise ConfigError(f"{count} prompts asked of the {split} split: give at most {held // 10}")
    tasks: dict[str, SortTask] = {}
    for task in _random_tasks(split, rng):
        if len(tasks) == count:
            break
        tasks.setdefault(task.prompt, task)
    return list(tasks.values())


def _write_tasks(path: Path, tasks: Iterable[SortTask]) -> None:
    lines = (json.dumps({"prompt": task.prompt, "answer": task.answer}) + "\n" for task in tasks)
    path.write_text("".join(lines), encoding="utf-8")


def build_byte_tokenizer() -> Qwen2Tokenizer:
    """Build the fast tokenizer in which the id of every byte is its value, pad is 256 and eos is 257.

    It is byte-level BPE without merges, and adds no token of its own. Ids 258 to 271 exist only to fill the
    embedding: no text encodes to them, and they decode to visible text, so that a verifier can never overlook one.

    AutoTokenizer gives every model of the Qwen2 architecture this class, whatever the files ask for; building it here
    makes the files agree with it. Its one trace is that text is brought to Unicode NFC before it becomes bytes.
    """
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    vocab |= {"<pad>": PAD_ID, "<eos>": EOS_ID}
    vocab |= {f"<unused{token_id}>": token_id for token_id in range(EOS_ID + 1, VOCAB_SIZE)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        # The default would be added as id 272, which the embedding does not have.
        unk_token=None,  # type: ignore[arg-type]
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=CONTEXT_TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """Return the printable stand-in of each byte that GPT-2's byte-level alphabet defines, in byte order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    # Bytes without a printable character of their own take the code points from 256 on, in order.
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def new_tiny_network(hidden: int, layers: int) -> Qwen2ForCausalLM:
    """Make the tiny architecture with weights drawn from torch's global generator."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    model: Qwen2ForCausalLM = Qwen2ForCausalLM(config).float()
    # Engines take sampling defaults from this file: it must hold the token ids and nothing else.
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, eos_token_id=EOS_ID)
    return model


def warm_start(
    model: Qwen2ForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    report_loss: Callable[[int, float], None] | None,
) -> float:
    """Train `model` in place on batches of token ids and labels [B, T]; return the last loss, in nats per labelled token."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=_BETAS, weight_decay=_WEIGHT_DECAY, foreach=False)
    loss_value = float("nan")
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * _learning_rate_factor(step, steps)
        input_ids, labels = next(batches)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=NO_LABEL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM_MAX)
        optimizer.step()
        loss_value = loss.item()
        if report_loss is not None:
            report_loss(step, loss_value)
    return loss_value


def _demonstrations(rng: random.Random, mistake_share: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw batches of demonstrations without end."""
    tasks = _random_tasks("demonstration", rng)
    while True:
        batch = list(islice(tasks, BATCH_SIZE))
        yield _collate_demonstrations([_demonstrate(task, mistake_share, rng) for task in batch])


def _demonstrate(task: SortTask, mistake_share: float, rng: random.Random) -> tuple[str, str]:
    """Return prompt and shown answer, which with probability `mistake_share` is in descending order."""
    is_mistake = rng.random() < mistake_share
    return task.prompt, task.answer[::-1] if is_mistake else task.answer


def _learning_rate_factor(step: int, steps: int) -> float:
    """Linear rise over the first 50 steps, linear fall over the last 30 %; `step` counts from 1."""
    return min(1.0, step / _LR_RISE_STEPS, (steps - step + 1) / (_LR_FALL_SHARE * steps))


def _collate_demonstrations(pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, both [B, T] int64; only answer and eos positions have labels."""
    return collate([[(list(prompt.encode()), False), ([*answer.encode(), EOS_ID], True)] for prompt, answer in pairs])


def collate(rows: Sequence[Sequence[tuple[list[int], bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the pieces of each row, right-padded; return ids and labels, both [B, T] int64, labels on pieces marked True only.

    Padding stands behind everything that has a label, so causal attention alone keeps it out of the loss.
    """
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    input_ids = torch.full((len(rows), width), PAD_ID)
    labels = torch.full((len(rows), width), NO_LABEL)
    for index, row in enumerate(rows):
        begin = 0
        for ids, has_labels in row:
            end = begin + len(ids)
            input_ids[index, begin:end] = torch.tensor(ids)
            if has_labels:
                labels[index, begin:end] = torch.tensor(ids)
            begin = end
    return input_ids, labels


def measure_accuracy(model: torch.nn.Module, tasks: Sequence[SortTask], *, sampling_seed: int | None = None) -> float:
    """Return the share of tasks answered exactly and closed by eos: greedy, or sampled at T=1 from `sampling_seed`."""
    right = 0
    for length in sorted({len(task.prompt) for task in tasks}):
        same_length = [task for task in tasks if len(task.prompt) == length]
        generator = None
        if sampling_seed is not None:
            generator = torch.Generator().manual_seed(sampling_seed + length)
        prompts = torch.tensor([list(task.prompt.encode()) for task in same_length])
        rows = generate(model, prompts, ANSWER_TOKENS_MAX, generator)
        right += sum(text_before_eos(row) == task.answer for row, task in zip(rows.tolist(), same_length, strict=True))
    return right / len(tasks)


@torch.no_grad()
def generate(model: torch.nn.Module, input_ids: torch.Tensor, tokens: int, generator: torch.Generator | None) -> torch.Tensor:
    """Continue prompts [B, T] of one length by `tokens`, greedily without a generator; those after eos carry no meaning."""
    model.eval()
    prompt_tokens = input_ids.shape[1]
    for _ in range(tokens):
        logits = model(input_ids=input_ids, use_cache=False).logits[:, -1]
        if generator is None:
            chosen = logits.argmax(dim=-1, keepdim=True)
        else:
            chosen = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        input_ids = torch.cat([input_ids, chosen], dim=1)
    return input_ids[:, prompt_tokens:]


def text_before_eos(token_ids: Sequence[int]) -> str | None:
    """Return the text that ends at the first eos, or None where eos is missing or a token before it is no byte."""
    if EOS_ID not in token_ids:
        return None
    answer = token_ids[: token_ids.index(EOS_ID)]
    return bytes(answer).decode("latin-1") if all(token_id < 256 for token_id in answer) else None


@contextmanager
def deterministic_on_one_thread(seed: int) -> Iterator[None]:
    """Seed torch and pin it to one thread and deterministic algorithms; the caller's settings return afterwards."""
    threads = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warning)
            torch.set_num_threads(threads)
