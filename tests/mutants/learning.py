"""Defects in the learner, its checkpoints, and the task stream."""

from __future__ import annotations

from typing import Any

from mutants.registry import mutant
from rollbook.core.records import Checkpoint


@mutant("rollbook.learner.loop", "Learner.checkpoint")
def a_stop_saves_nothing(original: Any) -> Any:
    """torchtitan#3751: a job that is told to stop ends at once and loses what it made since its last interval."""

    def checkpoint(self: Any) -> None:
        if self.step % self.config.checkpoint.every_steps == 0:
            original(self)

    return checkpoint


@mutant("rollbook.learner.loop", "Learner.checkpoint")
def the_interval_is_only_tried(original: Any) -> Any:
    """NeMo-RL#3924: whether an interval writes anything depends on something nobody configured."""

    def checkpoint(self: Any) -> None:
        if self.step != 2:
            original(self)

    return checkpoint


@mutant("rollbook.learner.trainer", "Trainer.note")
def the_data_position_is_not_looked_at(original: Any) -> Any:
    """SkyRL#2010: a checkpoint keeps the step and passes over the data position."""

    def note(self: Any, **changes: Any) -> None:
        changes.pop("cursor", None)
        original(self, **changes)

    return note


@mutant("rollbook.learner.trainer", "Trainer.load_state_dict")
def the_random_state_begins_again(original: Any) -> Any:
    """ms-swift#9935: generators are seeded afresh at a resume."""

    def load(self: Any, state: Any) -> None:
        order = self._order.get_state()
        original(self, state)
        self._order.set_state(order)

    return load


@mutant("rollbook.learner.trainer", "load_optimizer")
def the_optimizer_begins_again(original: Any) -> Any:
    """open-r1#450, trl#3247: moments are lost at a resume and the loss curve has a step."""
    return lambda optimizer, tensors, values: None


@mutant("rollbook.learner.loop", "restore_newest")
def weights_without_their_position(original: Any) -> Any:
    """NeMo-RL#3820: weights come back from one time and the position from another."""

    def restore(trainer: Any, checkpoints: Any, client: Any, point: Any, recorded: Any) -> Any:
        fresh = {name: tensor.clone() for name, tensor in trainer.policy.named_tensors()}
        step = original(trainer, checkpoints, client, point, recorded)
        trainer._load_model(fresh)
        return step

    return restore


@mutant("rollbook.learner.checkpoint", "Checkpoints.save")
def the_mark_moves_before_the_files(original: Any) -> Any:
    """KempnerForge#102, pytorch-lightning#688: the latest checkpoint is named before it is whole."""

    def save(self: Any, state: Any) -> Any:
        p = state.progress
        if p.step:
            name = f"{p.lineage}.{p.step}.{self._term.epoch}"
            self._client.commit_checkpoint(self._term, Checkpoint(p.lineage, p.step, name, "0" * 64, p.chain_digest))
        return original(self, state)

    return save


@mutant("rollbook.learner.trainer", "correct")
def old_log_probs_are_the_new_ones(original: Any) -> Any:
    """SkyRL#1315: the old log-probs are the trainer's own, every ratio is 1 and nothing is ever clipped."""
    return lambda old, mu, mask, settings: original(old, old, mask, settings)


@mutant("rollbook.tasks.stream", "TaskStream._open")
def a_resume_at_an_epoch_edge_skips_an_epoch(original: Any) -> Any:
    """verl#7401: a run that resumes exactly between two epochs leaves one out and ends successfully."""

    def start(self: Any, state: Any) -> None:
        if self.drawn and self.drawn % self._size == 0:
            self.drawn, state = self.drawn + self._size, None
        original(self, state)

    return start


@mutant("rollbook.tasks.stream", "TaskStream.exhausted")
def an_epoch_edge_is_the_end(original: Any) -> Any:
    """meta-pytorch/data#1437: a state saved at the edge of an epoch resumes as about to end."""

    def exhausted(self: Any) -> bool:
        return original.fget(self) or (self._end is not None and self.drawn > 0 and self.drawn % self._size == 0)

    return property(exhausted)


@mutant("rollbook.tasks.feeder", "Feeder._stream_at")
def the_stream_begins_again(original: Any) -> Any:
    """open-instruct#1523: the state of the data actor is not restored and the same prompts come again."""

    def stream_at(self: Any, cursor: Any) -> Any:
        import dataclasses

        known = self._stream is not None
        stream = original(self, cursor if known else dataclasses.replace(cursor, state_json="{}"))
        self._state_json = cursor.state_json
        return stream

    return stream_at


@mutant("rollbook.tasks.feeder", "Feeder.run")
def a_crash_sends_the_end_of_the_data(original: Any) -> Any:
    """verl#6387: whatever ends the producer, the mark of the end of data is sent."""

    def run(self: Any, term: Any) -> None:
        import dataclasses

        from rollbook.core.records import TASK_STREAM

        try:
            original(self, term)
        except RuntimeError:
            cursor = self._client.cursor(TASK_STREAM)
            self._client.append_groups(term, cursor, dataclasses.replace(cursor, exhausted=True), [])
            raise

    return run
