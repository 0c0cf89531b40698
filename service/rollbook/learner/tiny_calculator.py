"""The tiny model's start for the calculator: it can call the tool, but mostly has other habits.

Owns the demonstrations, which are whole episodes: calls, the tool's answers and final answers, so that what stands behind
an answer of the tool is nothing new to the model. A share of them guesses, forgets the closing bracket, writes a call that
the tool refuses, or a final answer of the wrong form; reinforcement learning chooses the right habit. Never does
reinforcement learning. Architecture, tokenizer and training are those of ``tiny_model``.

Upholds P12 (reproducible): as there, the same making gives the same bytes on the same machine and package versions.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rollbook.core.environments import ToolReply
from rollbook.learner import tiny_model as tm
from rollbook.learner.model_dir import new_model_directory, write_made_record
from rollbook.tasks.calculator import Calculator, evaluate, tasks_of

TURN_TOKENS_MAX = 10
TURNS_MAX = 4

HABITS = {
    "tool": 0.38,
    "tool, then no equals sign": 0.03,
    "refused call, then tool": 0.05,
    "call without its end": 0.03,
    "guess": 0.51,
}
"""Share of each habit in the demonstrations; guessing is the likelier first step, so that greedy decoding starts wrong."""

_SAMPLED_ACCURACY_SEED = 1234
_CALCULATOR = Calculator(sandbox=False)


@dataclass
class Transcript:
    """One episode as it is played: the pieces of its token sequence, each sampled by the model or not."""

    task: dict[str, Any]
    pieces: list[tuple[list[int], bool]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of the model's turns."""
    over: bool = False

    def __post_init__(self) -> None:
        self.pieces.append((list(self.task["prompt"].encode()), False))

    @property
    def token_ids(self) -> list[int]:
        return [token_id for ids, _ in self.pieces for token_id in ids]

    @property
    def is_right(self) -> bool:
        return self.over and self.texts[-1] == f"={self.task['answer']}"

    def stop(self, token_ids: list[int]) -> None:
        """Add a turn that was cut off before eos, and end."""
        self.pieces.append((token_ids, True))
        self.texts.append("")
        self.over = True

    def turn(self, text: str) -> None:
        """Add a turn of the model that ends with eos and, where it is a call, the tool's answer."""
        self.pieces.append(([*text.encode("latin-1"), tm.EOS_ID], True))
        self.texts.append(text)
        request = _CALCULATOR.parse(text)
        if request is None:
            self.over = True
            return
        reply = _CALCULATOR.render(ToolReply(_value(request.arguments["code"])))
        self.pieces.append((list(reply.encode()), False))


def _value(code: str) -> str:
    try:
        return str(evaluate(code))
    except ValueError:
        return "error"


def make_tiny_calculator(
    out_dir: str | os.PathLike[str],
    *,
    seed: int = 0,
    steps: int = 400,
    hidden: int = 64,
    layers: int = 2,
    heldout_tasks: int = 500,
    report_loss: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Make the tiny model, warm-start it on episodes of the calculator, and write it as a Hugging Face directory.

    Writes config, fp32 safetensors, tokenizer and `made.json`; the tasks come from the environment. At the defaults the
    weights have 100,032 parameters and the making takes about a minute on one CPU thread.

    Args:
        out_dir: a new or empty directory.
        seed: of the initial weights and of the drawn demonstrations.
        steps: optimizer steps of the warm start, 256 episodes each.
        hidden: model width, a multiple of 32.
        layers: transformer blocks.
        heldout_tasks: tasks on which the accuracies in `made.json` are measured.
        report_loss: called after each step with the step number, from 1, and its loss in nats per token.

    Returns:
        The content of `made.json`.

    Raises:
        ConfigError: a value is out of its range, or `out_dir` has content.
    """
    tm.check_counts(hidden, {"steps": steps, "layers": layers, "heldout_tasks": heldout_tasks})
    with new_model_directory(out_dir) as directory, tm.deterministic_on_one_thread(seed):
        heldout = list(Calculator(heldout_tasks=heldout_tasks).load("heldout"))
        model = tm.new_tiny_network(hidden, layers)
        loss = tm.warm_start(model, _demonstrations(random.Random(tm.DEMONSTRATION_SEED + seed)), steps, report_loss)
        model.save_pretrained(directory)
        tm.build_byte_tokenizer().save_pretrained(directory)
        record = {
            "command": f"rollbook model tiny DIR --task calculator --seed {seed} --steps {steps} --hidden {hidden}",
            "seed": seed,
            "steps": steps,
            "hidden": hidden,
            "layers": layers,
            "habits": HABITS,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "final_loss": round(loss, 4),
            "heldout_tasks": heldout_tasks,
            "heldout_accuracy": {
                "greedy": measure_accuracy(model, heldout),
                "sampled": measure_accuracy(model, heldout, sampling_seed=_SAMPLED_ACCURACY_SEED),
            },
        }
        return write_made_record(directory, record, ("torch", "transformers", "tokenizers"))


def demonstrate(task: dict[str, Any], rng: random.Random) -> Transcript:
    """Return an episode that shows a habit, drawn by its share."""
    habit = rng.choices(list(HABITS), list(HABITS.values()))[0]
    expression, answer, shown = task["expression"], task["answer"], Transcript(task)
    if habit == "guess":
        shown.turn(f"={_guess(rng)}")
    elif habit == "call without its end":
        shown.turn(f"[{expression}")
    else:
        if habit == "refused call, then tool":
            shown.turn(f"[{expression[:-1]}]")
        shown.turn(f"[{expression}]")
        shown.turn(answer if habit == "tool, then no equals sign" else f"={answer}")
    return shown


def _guess(rng: random.Random) -> int:
    """A number of one to three digits, whatever the task: a guess teaches no arithmetic."""
    return rng.randrange(10 ** rng.randint(1, 3))


def _demonstrations(rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw batches of demonstrations without end."""
    tasks = tasks_of("demonstration")
    while True:
        yield tm.collate([demonstrate(rng.choice(tasks), rng).pieces for _ in range(tm.BATCH_SIZE)])


def measure_accuracy(model: torch.nn.Module, tasks: Sequence[dict[str, Any]], *, sampling_seed: int | None = None) -> float:
    """Return the share of tasks answered exactly: greedy, or sampled at T=1 from `sampling_seed`."""
    generator = None if sampling_seed is None else torch.Generator().manual_seed(sampling_seed)
    return sum(transcript.is_right for transcript in play(model, tasks, generator)) / len(tasks)


def play(model: torch.nn.Module, tasks: Sequence[dict[str, Any]], generator: torch.Generator | None) -> list[Transcript]:
    """Play one episode of each task, at most four turns long; one whose turn is not closed by eos ends there."""
    transcripts = [Transcript(task) for task in tasks]
    for _ in range(TURNS_MAX):
        by_length: dict[int, list[Transcript]] = defaultdict(list)
        for transcript in transcripts:
            if not transcript.over:
                by_length[len(transcript.token_ids)].append(transcript)
        for _, same_length in sorted(by_length.items()):
            prompts = torch.tensor([transcript.token_ids for transcript in same_length])
            rows = tm.generate(model, prompts, TURN_TOKENS_MAX, generator)
            for transcript, row in zip(same_length, rows.tolist(), strict=True):
                text = tm.text_before_eos(row)
                if text is None:
                    transcript.stop(row)
                else:
                    transcript.turn(text)
    return transcripts
