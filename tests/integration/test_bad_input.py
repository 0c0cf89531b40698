"""Wrong inputs, reward functions, samples and commands: each is named with the way out, and costs nothing that was recorded."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator

import pytest

from bad_input_support import RUN_ID, Hand, ServedLedger, edited, served_run, small_run, submission, trajectory
from rollbook.cli.main import main
from rollbook.core.errors import TooLarge, UnknownSlot, WrongRun
from rollbook.core.records import SlotKey, SubmitOutcome, Trajectory
from rollbook.rpc.client import LedgerClient
from run_support import TinyRun

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """A run that is only ever started with wrong inputs, until it is started with good ones."""
    run = small_run(tmp_path_factory.mktemp("refused"))
    yield run
    run.end()


GOOD_TASK = b'{"prompt": "sort 1:", "answer": "1"}\n'
WHOLE = "model/model.safetensors"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        (WHOLE, None, "model.path = {root}/model is not a model directory: *.safetensors missing; name a local Hugging Face"),
        (WHOLE, b"x" * 5000, "model.safetensors: a header of"),
        (WHOLE, b"", "model.safetensors has 0 bytes: not a safetensors file, or cut off while written"),
        ("model/config.json", None, "model.path = {root}/model is not a model directory: config.json missing"),
        ("model/config.json", b"{", "{root}/model/config.json cannot be read: Expecting property name"),
        ("model/tokenizer.json", None, "model.path = '{root}/model' holds no tokenizer: expected tokenizer.json or one of"),
        ("tasks.jsonl", None, "task file {root}/tasks.jsonl cannot be read: No such file or directory"),
        ("tasks.jsonl", b"\n", "{root}/tasks.jsonl holds no tasks"),
        ("tasks.jsonl", GOOD_TASK + b'{"prompt": "x",\n', "{root}/tasks.jsonl line 2: not valid JSON: Expecting property name"),
        ("tasks.jsonl", GOOD_TASK * 2 + b'{"prompt": "x"}\n', "{root}/tasks.jsonl line 3: no answer in field 'answer'"),
        ("tasks.jsonl", GOOD_TASK + b'{"prompt": "\xff", "answer": "1"}\n', "{root}/tasks.jsonl line 2: not UTF-8"),
        ("tasks.jsonl", GOOD_TASK + b'{"answer": "1"}\n', "line 2: task.prompt_template = '{{prompt}}' asks for 'prompt', which"),
        ("judge.py", None, "task.reward = '{root}/judge.py:good': there is no file {root}/judge.py"),
    ],
)
def test_a_wrong_file_is_named_before_anything_is_opened(
    refused: TinyRun, capsys: pytest.CaptureFixture[str], name: str, data: bytes | None, said: str
) -> None:
    with edited(refused.root / name, data):
        code = main(["run", str(refused.config)])
    message = capsys.readouterr().err
    assert code == 2 and message.startswith("rollbook run: ")
    assert said.format(root=refused.root) in message
    assert not refused.dir.exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("model.path=nowhere", "model.path = {root}/nowhere: no such directory"),
        ("model.path=tasks.jsonl", "model.path = {root}/tasks.jsonl: no such directory"),
        ("task.path=none.jsonl", "task file {root}/none.jsonl cannot be read"),
        ("task.heldout_path=none.jsonl", "task file {root}/none.jsonl cannot be read"),
        ("task.heldout_path=tasks.jsonl", "repeat prompts of the training tasks"),
        ("task.reward=judge.py:gooood", "{root}/judge.py has no 'gooood'; did you mean 'good'?"),
        ("task.reward=judge.py:number", "task.reward = '{root}/judge.py:number' is a int, expected a function"),
        ("task.reward=no_such_module:f", "there is no module 'no_such_module' on the import path; name a file as"),
        ("task.reward=good", "task.reward = 'good': write module:attribute or file.py:attribute"),
        ("task.completion_pattern='('", "task.completion_pattern"),
        ("workers.0.engin=vllm", "unknown key workers[0].engin; did you mean workers[0].engine?"),
        ("sampling.top_p=0.9", "sampling.top_p = 0.9: only 1.0 is supported"),
        ("workers.0.engine=vllm workers.0.dtype=float64", "workers[0].dtype = 'float64': the vllm engine computes in float32"),
    ],
)
def test_a_wrong_place_or_name_is_told_before_anything_is_opened(
    refused: TinyRun, capsys: pytest.CaptureFixture[str], overrides: str, said: str
) -> None:
    assert main(["run", str(refused.config), *(f"--set={one}" for one in overrides.split())]) == 2
    assert said.format(root=refused.root) in capsys.readouterr().err
    assert not refused.dir.exists()


def test_doctor_finds_the_same_without_starting_anything(refused: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    with edited(refused.root / "model/tokenizer.json", None), socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["doctor", str(refused.config), "--set", f"ledger.address={address}"]) == 1
    printed = capsys.readouterr().out
    assert f"FAIL inputs         ConfigError: model.path = '{refused.root}/model' holds no tokenizer" in printed
    assert f"{address}: Address already in use; set ledger.address to a free port, or to 127.0.0.1:0" in printed
    assert not refused.dir.exists()


def test_a_run_that_never_started_says_so(refused: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status"], ["audit"], ["why", "0.0"], ["quarantine", "0", "--reason", "x"]):
        assert main([command[0], str(refused.config), *command[1:]]) == 2
        assert f"the run '{RUN_ID}' was never started (rollbook run CONFIG)" in capsys.readouterr().err
    assert main(["status", str(refused.root)]) == 2
    assert "holds no config.json, so it is not a run directory; name the run's TOML file" in capsys.readouterr().err
    assert main(["status", str(refused.root / "none.toml")]) == 2
    assert f"no configuration file at {refused.root / 'none.toml'}" in capsys.readouterr().err
    assert not refused.dir.exists()


def test_a_port_in_use_is_named_and_the_refused_run_then_starts_without_a_change(refused: TinyRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = refused.command("run", str(refused.config), "--set", f"ledger.address={address}")
        assert code == 2 and "ledger refuses to start:" in text
        assert f"cannot listen on {address}: the port is in use or the host is not this machine's" in text
        assert "set ledger.address to 127.0.0.1:0 for a free one" in text
    served = ServedLedger(refused)
    with served.client() as client:
        assert client.run_status()["groups"]["issued"] == 0
    served.stop()


def test_a_prompt_longer_than_the_model_takes_is_named_before_anything_is_fed(refused: TinyRun) -> None:
    served = ServedLedger(refused)
    long = json.dumps({"prompt": "sort " + "1" * 80 + ":", "answer": "1"}).encode()
    with edited(refused.root / "tasks.jsonl", GOOD_TASK * 3 + long + b"\n"):
        code, text = refused.command("feeder", str(refused.config))
    assert code == 2
    assert f"rollbook feeder: {refused.root}/tasks.jsonl line 4: its prompt has 86 tokens, more than the 60 that the" in text
    assert "remove the task or raise max_model_len" in text
    with served.client() as client:
        assert client.run_status()["groups"]["issued"] == 0
    served.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedLedger]:
    """A ledger server that every test of a bad sample talks to."""
    made = served_run(tmp_path_factory.mktemp("served"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def hand(served: ServedLedger) -> Iterator[Hand]:
    with served.client() as client:
        player = Hand(client)
        player.feed(40)
        yield player


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trajectory": trajectory(logprobs=[-0.5, math.nan, -0.5])}, "a log-prob is not finite"),
        ({"trajectory": trajectory(logprobs=[-0.5, -math.inf, -0.5])}, "a log-prob is not finite"),
        ({"trajectory": trajectory(logprobs=[-0.5, 0.25, -0.5])}, "a log-prob is 0.25; a probability is at most 1"),
        ({"trajectory": trajectory(logprobs=[-0.5, -0.5])}, "lengths differ: 3 tokens, 2 logprobs, 3 versions"),
        ({"trajectory": trajectory(versions=4)}, "lengths differ: 3 tokens, 3 logprobs, 4 versions"),
        ({"trajectory": trajectory(mask=b"\1\1")}, "lengths differ: 3 tokens, 2 mask entries"),
        ({"trajectory": trajectory(mask=b"\1\2\1")}, "loss_mask holds values other than 0 and 1"),
        ({"trajectory": trajectory(mask=b"\0\0\0")}, "every token is masked: nothing here was sampled by the policy"),
        ({"trajectory": trajectory(0)}, "token_ids: needs at least one whole int32"),
        ({"trajectory": trajectory(65)}, "65 tokens; at most 64"),
        ({"trajectory": trajectory(version=7)}, "versions 7..7: only 0..0 are published"),
        ({"trajectory": trajectory(version=-1)}, "versions -1..-1: only 0..0 are published"),
        ({"key": SlotKey(900, 0)}, "the run has no slot 900.0"),
        ({"key": SlotKey(0, 2)}, "the run has no slot 0.2"),
        ({"lineage": 3}, "the run has no lineage 3"),
        ({"lease_token": 9}, "lease token 9 of slot"),
        ({"reward": math.nan}, "reward nan is not finite"),
        ({"reward": None}, "reward None with status 'given': a value goes with 'given' only"),
        ({"generate_s": math.nan}, "generate_s and verify_s must be finite"),
    ],
)
def test_a_sample_that_cannot_be_right_is_refused_by_name_and_its_slot_waits_for_a_good_one(
    hand: Hand, changes: dict, said: str
) -> None:
    (grant,) = hand.lease(1)
    before = hand.accepted()
    (result,) = hand.client.submit_samples([submission(grant, **changes)])
    assert result.outcome is SubmitOutcome.INVALID and said in result.reason
    assert hand.accepted() == before
    good = submission(grant)
    assert [r.outcome for r in hand.client.submit_samples([good])] == [SubmitOutcome.ACCEPTED]
    assert [r.outcome for r in hand.client.submit_samples([good])] == [SubmitOutcome.REPLAYED]
    assert hand.accepted() == before + 1


def test_a_bad_sample_does_not_hold_up_the_good_one_beside_it(hand: Hand) -> None:
    bad, good = hand.lease(2)
    results = hand.client.submit_samples([submission(bad, reward=math.inf), submission(good)])
    assert [r.outcome for r in results] == [SubmitOutcome.INVALID, SubmitOutcome.ACCEPTED]
    assert [r.key for r in results] == [bad.key, good.key]
    hand.client.submit_samples([submission(bad)])


def test_a_key_used_again_with_other_content_is_counted_and_the_stored_sample_stands(hand: Hand) -> None:
    (grant,) = hand.lease(1)
    hand.client.submit_samples([submission(grant)])
    conflicts, stored = hand.client.run_status()["submits"]["conflict"], hand.client.sample(grant.key)
    (result,) = hand.client.submit_samples([submission(grant, reward=0.0)])
    assert result.outcome is SubmitOutcome.CONFLICT
    assert result.reason.startswith(f"slot {grant.key}: the same submit key was used with other content; the stored sample")
    assert hand.client.run_status()["submits"]["conflict"] == conflicts + 1
    assert hand.client.sample(grant.key) == stored and stored.reward == 1.0


def test_a_client_of_another_run_is_told_both_names_and_changes_nothing(served: ServedLedger, hand: Hand) -> None:
    (grant,) = hand.lease(1)
    with served.client("other") as stranger:
        with pytest.raises(WrongRun, match=f"names run 'other', this server serves '{RUN_ID}'; check run.id and the address"):
            stranger.submit_samples([submission(grant)])
    assert [r.outcome for r in hand.client.submit_samples([submission(grant)])] == [SubmitOutcome.ACCEPTED]


def test_a_hundred_megabytes_of_tokens_are_refused_before_they_are_sent_and_by_the_server_as_well(
    served: ServedLedger, hand: Hand
) -> None:
    (grant,) = hand.lease(1)
    part = b"\1" * 33_333_332
    huge = submission(grant, trajectory=Trajectory(part, part, part))
    with LedgerClient("127.0.0.1:1", RUN_ID, retry_total_s=0.0) as nobody_listens:
        (result,) = nobody_listens.submit_samples([huge])
    assert result.outcome is SubmitOutcome.INVALID
    said = rf"TooLarge: slot {grant.key} has 1000000\d\d bytes, a message may have 67107840; shorten the completion"
    assert re.fullmatch(said, result.reason), result.reason
    with served.client(max_message_bytes=1 << 30) as careless:
        with pytest.raises(TooLarge, match="larger than max .*; send or ask for fewer items per call"):
            careless.submit_samples([huge])
    (result,) = hand.client.submit_samples([submission(grant, trajectory=Trajectory(*[part[: 12 << 20]] * 3))])
    assert result.outcome is SubmitOutcome.INVALID and result.reason == f"{3 << 20} tokens; at most 64"
    assert [r.outcome for r in hand.client.submit_samples([submission(grant)])] == [SubmitOutcome.ACCEPTED]


def test_a_sample_id_that_is_none_is_told_how_one_looks(
    served: ServedLedger, hand: Hand, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("abc", "1", "1.x", "-1.0", "99999999999999999999.0", "9" * 5000 + ".0", "1.2.3", ""):
        assert main(["why", str(served.run.dir), *(["--"] if text.startswith("-") else []), text]) == 2
        assert "is not a sample id; write ORDINAL.SIBLING, for example 12.3" in capsys.readouterr().err
    assert main(["why", str(served.run.dir), "700.0"]) == 1
    last = hand.client.cursor("train").next_ordinal - 1
    assert f"UnknownSlot: run '{RUN_ID}' has no sample 700.0; ordinals go from 0 to {last}" in capsys.readouterr().err
    with pytest.raises(UnknownSlot):
        hand.client.sample(SlotKey(700, 0))
    for verb in ("quarantine", "retry"):
        assert main([verb, str(served.run.dir), "700", "--reason", "x"]) == 1
        assert "UnknownSlot: the run has no group 700" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            main([verb, str(served.run.dir), "9" * 20, "--reason", "x"])
        assert "is no ordinal: write the number before the dot of a sample id" in capsys.readouterr().err
    assert main(["quarantine", str(served.run.dir), "0", "--reason", ""]) == 1
    assert "a quarantine needs a reason" in capsys.readouterr().err


def test_a_second_server_on_the_same_file_is_refused_while_the_first_serves_on(served: ServedLedger, hand: Hand) -> None:
    (grant,) = hand.lease(1)
    code, text = served.run.command("ledger", str(served.run.config), "--set", "run.steps=1000")
    assert code == 1
    assert f"LedgerLocked: another ledger server holds {served.run.dir}/ledger.sqlite (lock file" in text
    assert "stop it first, or use its address" in text
    assert [r.outcome for r in hand.client.submit_samples([submission(grant)])] == [SubmitOutcome.ACCEPTED]
    assert hand.client.audit() == []


def test_another_run_in_the_same_directory_is_refused(served: ServedLedger) -> None:
    code, text = served.run.command("run", str(served.run.config), "--set", "run.id=second")
    assert code == 2
    assert f"run.dir = {served.run.dir} holds the run '{RUN_ID}'" in text and "choose another run.dir for 'second'" in text


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinyRun, int, str]]:
    """Bounded schedule, with a reward function that raises for one completion and gives NaN for another."""
    run = small_run(tmp_path_factory.mktemp("judged"), "breaks_for_one", "\n[ledger]\nattempts_max = 2\n")
    code, text = run.run("--no-report")
    yield run, code, text
    run.end()


def story(run: TinyRun, sample: str, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["why", "--json", str(run.dir), sample]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_reward_function_that_raises_gives_no_reward_is_retried_then_quarantined_and_the_run_goes_on(
    judged: tuple[TinyRun, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, code, text = judged
    assert code == 0 and "audit: clean" in text, f"{text}\n{run.tails()}"
    broken = story(run, "0.0", capsys)
    assert broken["state"] == "quarantined" and "reward" not in broken and broken["refilled_by"] == 2
    failed = [entry for entry in broken["history"] if entry["what"] == "failure_reported"]
    assert [(f["status"], f["attempt"]) for f in failed] == [("verifier_error", 1), ("verifier_error", 2)]
    judge = f"{run.root}/judge.py"
    said = f"reward function {judge}:breaks_for_one raised LookupError: the table of answers is gone ({judge}:"
    assert all(f["reason"].startswith(said) for f in failed)
    assert broken["reason"].startswith(f"2 attempts without a sample; last: verifier_error: {said}")
    assert story(run, "0.1", capsys)["state"] == "cancelled"
    refill = story(run, "2.0", capsys)
    assert (refill["refills"], refill["state"]) == (0, "applied") and 0.0 <= refill["reward"] <= 1.0


def test_a_reward_that_is_not_a_number_is_counted_and_tried_again(
    judged: tuple[TinyRun, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = judged
    told = story(run, "1.0", capsys)
    (failed,) = [entry for entry in told["history"] if entry["what"] == "failure_reported"]
    assert failed["status"] == "verifier_error"
    assert failed["reason"] == f"reward function {run.root}/judge.py:breaks_for_one returned nan"
    assert told["state"] == "applied" and told["attempt"] == 2 and 0.0 <= told["reward"] <= 1.0
    assert main(["status", "--json", str(run.dir)]) == 0
    state = json.loads(capsys.readouterr().out)
    assert sum(n for reason, n in state["failures"].items() if reason.startswith("verifier_error: ")) == 3
    assert state["verdicts"] == {"cancelled": 1, "quarantined": 1}
    assert state["steps"]["trained"] == 2 and state["slots"]["applied"] == 4


def test_a_changed_configuration_is_refused_naming_the_fields_and_the_flags(judged: tuple[TinyRun, int, str]) -> None:
    run, *_ = judged
    changes = ("--set", "learner.lr=1e-3", "--set", "run.steps=3", "--set", "supervisor.drain_s=3")
    code, text = run.run("--no-report", *changes, "--accept", "run.steps")
    assert code == 2
    assert "ledger refuses to start:\nrollbook ledger: run 'tiny' was opened with another configuration" in text
    assert "(learner.lr: 0.0001 -> 0.001; run.steps: 2 -> 3); not accepted: learner.lr. Restore it, or" in text
    assert "accept each change by its name: --accept learner.lr --accept run.steps." in text
    code, text = run.command("run", str(run.config), "--accept", "learner.lrr")
    assert code == 2 and "--accept learner.lrr: the run has no such field; did you mean learner.lr?" in text
    assert run.alive() == []


@pytest.mark.parametrize(
    ("name", "field", "acceptable"),
    [
        ("tasks.jsonl", "task.dataset_sha256", True),
        ("judge.py", "task.reward_sha256", True),
        ("model/chat_template.jinja", "model.chat_template_sha256", True),
        ("model/model.safetensors", "model.weights_sha256", False),
        ("model/config.json", "model.config_sha256", False),
        ("model/tokenizer.json", "model.tokenizer_sha256", False),
    ],
)
def test_a_changed_input_is_refused_by_its_digest_and_accepted_only_where_nothing_depends_on_the_old_one(
    judged: tuple[TinyRun, int, str], name: str, field: str, acceptable: bool
) -> None:
    run, *_ = judged
    file = run.root / name
    new = not file.exists()
    if new:
        file.touch()
    data = bytearray(file.read_bytes())
    if name == "model/model.safetensors":
        data[-1] ^= 1
    else:
        data += b"\n"
    with edited(file, bytes(data)):
        code, text = run.command("ledger", str(run.config))
        assert code == 2 and f"another configuration ({field}: " in text and "… -> " in text
        if acceptable:
            assert f"accept each change by its name: --accept {field}." in text
        else:
            code, text = run.command("ledger", str(run.config), "--accept", field)
            assert code == 2 and f"{field} cannot change within a run: " in text
            assert "Restore it, or start a new run under another run.id and run.dir" in text
    if new:
        file.unlink()


def test_an_accepted_change_is_a_revision_from_the_first_unplanned_step_and_replay_uses_it(
    judged: tuple[TinyRun, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, *_ = judged
    changes = ("--set", "learner.lr=1e-3", "--set", "run.steps=3", "--set", "task.reward=judge.py:good")
    fields = ("learner.lr", "run.steps", "task.reward", "task.reward_sha256", "task.dataset_sha256")
    accepted = [f"--accept={field}" for field in fields]
    with (run.root / "tasks.jsonl").open("a") as file:
        file.write('{"prompt": "sort 1:", "answer": "1"}\n')
    with (run.root / "judge.py").open("a") as file:
        file.write("\n# a harmless edit\n")
    code, text = run.run("--no-report", *changes, *accepted)
    assert code == 0 and "audit: clean" in text, f"{text}\n{run.tails()}"
    assert main(["status", "--json", str(run.dir)]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["revision"], state["steps"]["trained"]) == (1, 3)
    assert state["last_step"]["lr"] == pytest.approx(1e-3 * 3 / 5), "the third of five warm-up steps to the new peak"
    stored = [json.loads((run.dir / "revisions" / f"{n}.json").read_text())["learner"]["lr"] for n in (0, 1)]
    assert stored == [1e-4, 1e-3]
    assert main(["replay", str(run.dir)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] and (result["steps"], result["versions_compared"]) == (3, 4)
    (run.dir / "revisions" / "0.json").write_text((run.dir / "revisions" / "1.json").read_text())
    assert main(["replay", str(run.dir)]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"]["step"] == 1, "so the revisions are what it used"
