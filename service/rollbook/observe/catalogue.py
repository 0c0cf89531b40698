"""Every failpoint of the product: where it stands, what a crash there leaves, and what recovery does about it.

Owns the names; a call site whose name is missing here, and an entry that nobody calls, fail a test. Never imported by what
decides anything. The numbers are the crash points of the ledger and checkpoint protocol: W worker and submission, S server
and storage, L learner and checkpoint, D data. ``python chaos/crash_points.py`` prints them with the tests that crash there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ROLES = ("ledger", "worker", "learner", "feeder", "supervisor", "sandbox")


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One named place."""

    name: str
    role: str
    """Whose process crosses it."""
    crash_points: tuple[str, ...]
    """Numbers of the crash points that a crash (or a pause, an error) here brings about; empty for places beside them."""
    recovery: str
    """One sentence: what state is left and what recovery does."""


_ROWS: tuple[tuple[str, str, str], ...] = (
    # The server's start and end.
    ("ledger.start.after_lock", "S2",
     "The file lock is gone with the process; the next server takes it and finds the database as the last one left it."),
    ("ledger.migrate.before_commit", "S2",
     "No table is changed, one transaction holds all of the migration; the next start runs it again."),
    ("ledger.start.after_migration", "S2",
     "The schema is current and nothing else happened; the next server goes on from there."),
    ("ledger.open.after_create", "S2",
     "Run, first revision and root lineage are stored, no server holds a term; the next start finds the run and attaches."),
    ("ledger.open.before_commit", "S2 S5",
     "Neither the new epoch nor the longer leases are stored; the next server takes the same epoch and extends them once."),
    ("ledger.open.after_fence", "S2 S5",
     "The epoch is taken and leases have their downtime back; the next server takes a larger epoch, leases gain no second TTL."),
    ("ledger.open.after_revision", "S2",
     "The revision is stored, its file is not written; the next start with the same configuration writes the file."),
    ("ledger.files.before_rename", "S2", "A temporary file is left beside the old one; the next start writes the file again."),
    ("ledger.files.after_rename", "S2",
     "The new file has its name, which power loss may still take back; the next start writes it again."),
    ("ledger.files.before_revision", "S2",
     "The file config.json is written, the revision's own is not; the next start writes it before a step is planned under it."),
    ("ledger.start.before_address", "S2",
     "A server listened that nobody could find; the next one writes its own address, clients read the file on each connect."),
    ("ledger.start.after_address", "S2",
     "The address names a dead port; clients repeat with the same key until the next server has replaced the file."),
    ("ledger.standby.before_fence", "S2 S5",
     "The last holder's term is over and the fence is not taken; another standby takes it, or this one after its restart."),
    ("ledger.standby.before_answers", "S2 S5",
     "The fence is taken and clients are still told of a standby; the term runs out and the next server takes a larger epoch."),
    ("ledger.close.after_release", "S2", "The term is over and the database consistent; the next server need not wait for it."),
    ("ledger.fence_lost", "S5",
     "A newer epoch serves; whatever this server still tried matched no fence row, was rolled back and was not answered."),
    # Group commit.
    ("ledger.before_commit", "W3 S1 S3",
     "Nothing of the group is stored and nobody was answered; all its callers repeat with the same keys."),
    ("ledger.after_commit", "W4 S1 S4",
     "The whole group is stored and nobody was answered; repeated calls are answered from the rows."),
    ("ledger.before_answers", "W4 S1",
     "The group is stored and memory follows it, nobody was answered; repeated calls are answered from the rows."),
    ("ledger.mid_answers", "W4 S1",
     "The group is stored and only some callers know; the others repeat and get the same answers."),
    # Verbs of the server: inside the transaction, and between COMMIT and the answer.
    ("ledger.role.before_commit", "L1", "No epoch is taken; the learner or feeder asks again."),
    ("ledger.role.after_commit", "L1",
     "The epoch is taken and its holder does not know; asking again under the same incarnation gives the same term."),
    ("ledger.append.before_cursor", "D1",
     "Groups are inserted and the cursor is not moved, in one transaction that is rolled back; the feeder draws them again."),
    ("ledger.append.before_commit", "D1", "Neither groups nor cursor are stored; the feeder reads the cursor and draws again."),
    ("ledger.append.after_commit", "D1 D2",
     "Groups, cursor and exhausted flag are stored, the answer is lost; the feeder goes on from the cursor it reads."),
    ("ledger.lease.before_commit", "W1", "Nothing is leased; the worker repeats the call."),
    ("ledger.lease.after_commit", "W1 W6",
     "Slots are leased to a worker that was not told; its repetition with the same request id gets the same grants."),
    ("ledger.submit.before_payloads", "W3",
     "Sample rows without their bytes exist inside a transaction that is rolled back; the worker submits again."),
    ("ledger.submit.before_commit", "W3", "No sample is stored; the worker repeats the call with the same keys."),
    ("ledger.submit.after_commit", "W4 W6",
     "Samples are stored, the answer is lost; the repetition is answered `replayed` and changes nothing."),
    ("ledger.report.before_commit", "W1", "The failure is not recorded; the worker repeats the report, or the lease runs out."),
    ("ledger.report.after_commit", "W1 W6",
     "The failure is recorded and the slot free, the answer is lost; the repetition is recognised by its lease token."),
    ("ledger.verdict.before_refill", "W1 L2",
     "Verdicts without their refill exist inside a transaction that is rolled back; the verb is repeated and closes the group."),
    ("ledger.plan.before_items", "L2",
     "A plan without items exists inside a transaction that is rolled back; it is planned again."),
    ("ledger.plan.before_commit", "L2", "No plan is stored, no group is closed; the learner asks again."),
    ("ledger.plan.after_commit", "L3",
     "The plan is stored, the answer is lost; asking for the step again returns the stored plan."),
    ("ledger.finish.before_commit", "L3", "The step has no outcome; the learner reports it again, or replays the step."),
    ("ledger.finish.after_commit", "L3",
     "The outcome is stored, the answer is lost; the first outcome stands and replay obeys it."),
    ("ledger.publish.before_commit", "L4",
     "The bytes are on disk and no row announces them; the learner publishes again and finds them whole."),
    ("ledger.publish.after_commit", "L4 W7",
     "The version is announced, the learner does not know; publishing the same digest again is success, another one is refused."),
    ("ledger.checkpoint.before_commit", "L9 L10",
     "The directory is whole and its row is missing; the learner repeats the call, or adopts the directory at its next start."),
    ("ledger.checkpoint.after_commit", "L10",
     "The row is stored, the answer is lost; the same manifest digest again is success."),
    ("ledger.fork.before_commit", "L4 W7",
     "Lineage, copied plans and verdicts exist in a transaction that is rolled back; the learner finds the difference again."),
    ("ledger.fork.after_commit", "L4 W7",
     "The new lineage is open, the answer is lost; forking again at the same step gives the same lineage."),
    ("ledger.mark.before_commit", "L11 L13", "The checkpoint keeps its state; the learner marks it again."),
    ("ledger.mark.after_commit", "L11 L13", "The checkpoint is marked, the answer is lost; marking it again changes nothing."),
    # Copies of the database.
    ("ledger.backup.before_rename", "S3",
     "The copy is whole under a temporary name and no backup has the name asked for; the command is given again."),
    ("ledger.restore.before_rename", "S3",
     "The database that was to be replaced lies aside, the copy has not its name yet; the command is given again."),
    # Rows that are let go.
    ("ledger.expire.before_commit", "S3",
     "The low watermark stands where it stood and every row is kept; the next round counts and marks the same range."),
    ("ledger.expire.after_commit", "S3",
     "The range is answered as expired and marked, its rows are still there; the next server's first round deletes them."),
    ("ledger.expire.before_drop_commit", "S3",
     "The partition is whole, dropping it was rolled back; the next round drops it."),
    ("ledger.expire.before_batch_commit", "S3",
     "Earlier batches are gone and this one is whole; the next round goes on from the lowest row that is left."),
    # Feeder.
    ("feeder.after_role", "D1", "The epoch is taken and nothing was fed; the successor takes the next one."),
    ("feeder.before_append", "D1",
     "Tasks were drawn in memory only; the successor rebuilds the stream from the cursor row and draws the same."),
    ("feeder.after_append", "D1 D2",
     "Groups and cursor are stored together; the successor goes on behind them, and at the end of the tasks feeds nothing."),
    ("feeder.before_release", "D2",
     "Everything is fed and the role is held until its term ends; the run needs no feeder any more."),
    # Worker: start and weights.
    ("worker.start.after_spool", "W4", "The spool was sent and answered; the successor finds it empty."),
    ("worker.start.after_note", "W1",
     "The dead process's leases are given back, its note still stands; reporting them again changes nothing."),
    ("worker.start.after_register", "W1", "An incarnation without leases is registered; the successor registers its own."),
    ("worker.load.before_proof", "W1",
     "No version was claimed, so nothing was leased under it; the successor loads and proves again."),
    ("worker.load.after_proof", "W1", "A version was proven and not yet claimed; the successor loads and proves again."),
    # Worker: a batch.
    ("worker.before_note", "W1", "Slots are leased and no note names them; they run out and are leased again."),
    ("worker.note.before_rename", "W1",
     "The note under its final name is the previous one or none; the slots run out and are leased again."),
    ("worker.after_lease", "W1 W5", "The note names the leases; the successor gives them back at once, otherwise they run out."),
    ("worker.mid_generate", "W1 W5",
     "Tokens existed in memory only; the slots are leased again and give the same under a fixed version."),
    ("worker.after_generate", "W2 W5", "Whole rollouts existed in memory only; the slots are generated again."),
    ("worker.spool.before_sync", "W2",
     "A file without its digest check or without durability is left; a whole one is sent, a torn one is set aside."),
    ("worker.spool.after_sync", "W2",
     "Some samples are durable under temporary names; the successor sends these and the rest is generated again."),
    ("worker.mid_spool", "W2",
     "All samples are durable under temporary names; the successor gives them their names and sends them."),
    ("worker.spool.between_renames", "W2",
     "Some samples have their final names, the others temporary ones; the successor sends all of them."),
    ("worker.spool.before_directory_sync", "W2",
     "All samples have their names, which power loss may still take back; what is there is sent, the rest is generated again."),
    ("worker.before_submit", "W2 W5",
     "The samples are durable in the spool; the successor sends them before it loads an engine."),
    ("worker.submit.after_answer", "W4 W6",
     "The ledger has the samples and so has the spool; the successor sends them again and is answered `replayed`."),
    ("worker.spool.between_discards", "W4 W6",
     "Part of the acknowledged samples is still spooled; sending these again changes nothing."),
    ("worker.after_submit", "W4", "Everything is acknowledged and forgotten here; the successor leases new slots."),
    ("worker.before_report", "W1",
     "The failures are not reported; the successor gives the leases back by the note, or they run out."),
    ("worker.before_note_removed", "W4",
     "The note names leases that are over; the successor's reports about them change nothing."),
    ("worker.spool.after_aside", "W2",
     "A file that cannot be sent is out of the way; its slot is leased again, the successor leaves the file alone."),
    ("worker.spool.after_adopted", "W2", "A temporary file has got its name and was not sent; the successor sends it."),
    # Worker: calls of tools.
    ("worker.tool.before_record", "W8", "The turn is in memory only; the slot is leased again and generates it again."),
    ("worker.tool.after_record", "W8",
     "The call is recorded and did not run; a pure tool runs now, the slot of another kind of tool gets a verdict."),
    ("worker.tool.after_call", "W8",
     "The tool has run and its answer is lost; a pure one runs again, a slot of another kind gets a verdict."),
    ("worker.tool.after_answer", "W8", "The answer is recorded; the successor goes on behind it and runs nothing again."),
    ("sandbox.before_spawn", "W8", "No sandbox was made: infrastructure's failure, tried again in a fresh one, never a reward."),
    # Learner: role and start.
    ("learner.after_role", "L1", "The epoch is taken and nothing else happened; the successor takes a larger one."),
    ("learner.role_lost", "L12", "A newer epoch trains; this process writes nothing any more and ends."),
    ("learner.before_release", "L10",
     "Every step is made and checkpointed; the successor finds nothing to do and gives its role up."),
    ("learner.start.after_version", "L4",
     "Version 0 is published, checkpoint 0 is missing; the successor compares the digest and commits it."),
    ("learner.resume.between_clears", "L5 L6 L7",
     "Some leftovers under temporary names are removed; the successor removes the rest."),
    ("learner.resume.before_adopt", "L9", "A verified directory still lacks its row; the successor verifies and adopts it."),
    ("learner.resume.after_adopt", "L9 L10", "The directory is committed; the successor loads it."),
    ("learner.resume.after_corrupt", "L13",
     "The row says corrupt, the directory keeps its name; the successor loads an older checkpoint and removes the directory."),
    ("learner.resume.after_aside", "L13 L14",
     "The directory is out of the way for a person to look at; the successor does not see it."),
    ("learner.resume.opened", "L3", "State is loaded in memory only; the successor loads it again and replays the same plans."),
    # Learner: a step.
    ("learner.before_plan", "L1 L3",
     "The last published step is the state to reach; the successor replays stored plans up to it."),
    ("learner.after_plan", "L3", "The step is planned and not trained; the successor trains the stored plan."),
    ("learner.after_fetch", "L3", "Payloads were read; the successor reads them again."),
    ("learner.mid_step", "L3",
     "Some minibatches are in weights that are lost; the successor trains the whole step from the checkpoint on."),
    ("learner.rank.after_state", "L3",
     "A rank has the state and has trained nothing with it; rank 0 ends with the rank's name, the successor starts all ranks."),
    ("learner.rank.before_sum", "L3",
     "A rank's part of a gradient is lost; rank 0 ends with the rank's name and the successor trains the step with all ranks."),
    ("learner.rank.after_sum", "L3",
     "The gradient is summed and a rank is gone; rank 0 ends before it publishes, and the successor trains the step again."),
    ("learner.after_step", "L3", "New weights existed in memory only; the successor replays the step."),
    ("learner.after_finish_plan", "L3 L4",
     "The outcome is stored, the version is not published; the successor replays and publishes it."),
    ("learner.revision.before_rename", "L3", "A configuration's file has a temporary name; the successor writes it again."),
    ("learner.revision.after_rename", "L3",
     "The file has its name, which power loss may still take back; a missing one is written again."),
    # Learner: a version.
    ("learner.publish.between_clears", "L4", "Some unfinished version directories are removed; the successor removes the rest."),
    ("learner.publish.after_file", "L4",
     "A version's bytes stand under a temporary name; the successor removes and writes them again."),
    ("learner.publish.before_rename", "L4",
     "A whole version stands under a temporary name; the successor removes and writes it again."),
    ("learner.before_publish_row", "L4",
     "The bytes are whole under their name and no row announces them; the successor finds them whole."),
    ("learner.after_publish", "L4 W7",
     "The version is newer than the checkpoint; workers go on under it, replay gives its digest or the run stops or forks."),
    ("learner.publish.rewritten", "L4", "Missing bytes of the newest version are back; the successor finds them whole."),
    ("learner.versions.between_removals", "L11",
     "Some versions nobody can need are removed; the next checkpoint removes the rest."),
    ("learner.before_fork", "L4 W7",
     "How far the replay is from the record was measured in memory only; the successor replays, measures and forks."),
    ("learner.after_fork", "L4 W7",
     "The new lineage is open and its learner is not there yet; the successor resumes in it from the checkpoint of the fork."),
    # Learner: files and directories.
    ("learner.durable.mid_write", "L5 L6",
     "Half a file stands in a directory with a temporary name; the successor removes both."),
    ("learner.durable.after_rename", "L8",
     "A finished directory has its name, which power loss may still take back; no row says so, so either is right."),
    ("learner.durable.after_doom", "L11", "A directory to be deleted has lost its name; the successor deletes what is left."),
    ("learner.durable.before_unlink", "L11", "The same, and the lost name is durable; the successor deletes what is left."),
    # Learner: a checkpoint.
    ("learner.checkpoint.mid_files", "L5 L15",
     "Some files of a checkpoint stand in a temporary directory; the successor removes it."),
    ("learner.checkpoint.before_manifest", "L5 L15",
     "All files but the manifest stand in a temporary directory; the successor removes it."),
    ("learner.checkpoint.after_manifest", "L6",
     "A manifest without a durable directory entry; the successor removes the temporary directory."),
    ("learner.checkpoint.before_rename", "L7 L12",
     "A whole checkpoint has a temporary name; the successor removes it, a zombie's rename touches no other epoch's."),
    ("learner.checkpoint.after_rename", "L9 L12",
     "A whole directory lacks its row; the successor verifies hashes and chain and adopts it, a zombie's commit is fenced."),
    ("learner.checkpoint.after_row", "L10 L11", "The checkpoint is committed and older ones stand; the successor loads it."),
    ("learner.checkpoint.after_mark", "L11", "A row says deleting, its files stand; the successor removes the directory."),
    ("learner.checkpoint.after_removal", "L11",
     "A directory is gone, others to be deleted may stand; the successor removes them."),
    # Supervisor.
    ("supervisor.start.before_spawn", "", "The table names a role without a process; the successor finds nothing to end."),
    ("supervisor.start.after_spawn", "",
     "A process runs that the table does not name by pid; it dies with its supervisor, or is found by its incarnation."),
    ("supervisor.table.before_rename", "", "The table on disk is the previous one; roles die with their supervisor."),
)  # fmt: skip


def _of(name: str, crash_points: str, recovery: str) -> tuple[str, Failpoint]:
    return name, Failpoint(name, name.partition(".")[0], tuple(crash_points.split()), recovery)


CATALOGUE: Mapping[str, Failpoint] = MappingProxyType(dict(_of(*row) for row in _ROWS))
"""By name, in the order of a run: start and verbs of the server, feeder, worker, learner, supervisor."""
