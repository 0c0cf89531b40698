"""Publishing: durable before the row, repeatable, and described by a digest and a probe of what was really written."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner_support import VOCAB_SIZE, MemoryLedger, make_config, make_model_dir
from rollbook.core.errors import Fenced, ReplayDiverged
from rollbook.core.records import Role
from rollbook.core.weights import safetensors_digest
from rollbook.learner.model import Policy, load_policy
from rollbook.learner.publish import WEIGHTS_FILE, Publisher
from rollbook.observe import failpoints
from rollbook.observe.failpoints import FailpointRaised


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir, tmp_path):
    return make_config(model_dir, tmp_path)


@pytest.fixture
def ledger(config):
    ledger = MemoryLedger(config)
    ledger.acquire_role(Role.LEARNER, "one", 3.0)
    return ledger


@pytest.fixture
def policy(config):
    return load_policy(config)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")


def names(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "versions").iterdir())


def move(policy: Policy, by: float) -> None:
    with torch.no_grad():
        next(iter(policy.weights().values())).add_(by)


def test_a_version_names_the_digest_of_the_bytes_on_disk(config, ledger, policy, tmp_path):
    version = Publisher(config, policy, ledger, ledger.term).publish(0, 0)
    file = tmp_path / version.path / WEIGHTS_FILE
    assert version.path == f"versions/0.0.{version.digest[:12]}"
    assert safetensors_digest(file) == version.digest and file.stat().st_size == version.n_bytes
    assert ledger.published[0] == version


def test_tied_weights_are_published_once_and_load_into_a_model(config, ledger, policy, tmp_path, model_dir):
    move(policy, 0.25)
    version = Publisher(config, policy, ledger, ledger.term).publish(0, 0)
    tensors = load_file(tmp_path / version.path / WEIGHTS_FILE)
    assert "lm_head.weight" not in tensors
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    tokens = list(range(10))
    assert Policy(model.eval()).score(tokens) == policy.score(tokens)


def test_untied_heads_are_published_too(tmp_path):
    config = make_config(make_model_dir(tmp_path / "untied", tied=False), tmp_path)
    ledger = MemoryLedger(config)
    ledger.acquire_role(Role.LEARNER, "one", 3.0)
    version = Publisher(config, load_policy(config), ledger, ledger.term).publish(0, 0)
    assert "lm_head.weight" in load_file(tmp_path / version.path / WEIGHTS_FILE)


def test_the_probe_holds_the_log_probs_of_the_weights_as_published(config, ledger, policy, tmp_path, model_dir):
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, publish_dtype="bfloat16"))
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    version = Publisher(config, policy, ledger, ledger.term).publish(0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights().items())
    tensors = load_file(tmp_path / version.path / WEIGHTS_FILE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.load_state_dict(tensors, strict=False)
    probe = json.loads(version.probe_json)
    assert probe["logprobs"] == Policy(model).score(probe["token_ids"])
    assert probe["logprobs"] != policy.score(probe["token_ids"])


def test_the_probe_is_the_same_tokens_for_every_version_and_fits_the_engine(config, ledger, policy):
    publisher = Publisher(config, policy, ledger, ledger.term)
    first = json.loads(publisher.publish(0, 0).probe_json)
    move(policy, 0.25)
    second = json.loads(publisher.publish(0, 1).probe_json)
    assert first["token_ids"] == second["token_ids"] and first["logprobs"] != second["logprobs"]
    assert len(first["token_ids"]) == 47 and len(first["logprobs"]) == 46
    assert len(set(first["token_ids"])) > 20 and all(0 <= token < VOCAB_SIZE for token in first["token_ids"])


def test_a_planted_stale_head_fails_the_probe(tmp_path):
    config = make_config(make_model_dir(tmp_path / "untied", tied=False), tmp_path)
    ledger, policy, stale = MemoryLedger(config), load_policy(config), load_policy(config)
    ledger.acquire_role(Role.LEARNER, "one", 3.0)
    move(policy, 0.25)
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1.1)
        stale.model.model.embed_tokens.weight.copy_(policy.model.model.embed_tokens.weight)
    probe = json.loads(Publisher(config, policy, ledger, ledger.term).publish(0, 0).probe_json)
    gap = max(abs(a - b) for a, b in zip(stale.score(probe["token_ids"]), probe["logprobs"], strict=True))
    assert gap > 1e-2


@pytest.mark.parametrize("point", ["learner.before_publish_row", "learner.after_publish"])
def test_publishing_again_after_a_crash_changes_nothing(config, ledger, policy, tmp_path, point):
    failpoints.arm(f"{point}=raise")
    with pytest.raises(FailpointRaised):
        Publisher(config, policy, ledger, ledger.term).publish(0, 0)
    failpoints.arm("")
    assert (0 in ledger.published) is (point == "learner.after_publish")
    (before,) = names(tmp_path)
    made_at = (tmp_path / "versions" / before / WEIGHTS_FILE).stat().st_mtime_ns
    version = Publisher(config, policy, ledger, ledger.term).publish(0, 0)
    assert names(tmp_path) == [before] and version == ledger.published[0]
    assert (tmp_path / "versions" / before / WEIGHTS_FILE).stat().st_mtime_ns == made_at


def test_leftovers_and_torn_bytes_are_replaced(config, ledger, policy, tmp_path):
    publisher = Publisher(config, policy, ledger, ledger.term)
    version = publisher.publish(0, 0)
    file = tmp_path / version.path / WEIGHTS_FILE
    whole = file.read_bytes()
    (tmp_path / "versions" / "tmp.0.1.dead").mkdir()
    for torn in (whole[:-5], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(torn)
        Publisher(config, policy, ledger, ledger.term).ensure_bytes(version)
        assert file.read_bytes() == whole
    assert names(tmp_path) == [version.path.removeprefix("versions/")]


def test_another_digest_for_a_recorded_version_is_refused(config, ledger, policy):
    publisher = Publisher(config, policy, ledger, ledger.term)
    publisher.publish(0, 0)
    move(policy, 0.25)
    with pytest.raises(ReplayDiverged):
        publisher.publish(0, 0)


def test_a_fenced_learner_publishes_no_row(config, ledger, policy):
    publisher = Publisher(config, policy, ledger, ledger.term)
    ledger.acquire_role(Role.LEARNER, "two", 3.0, supersede="one")
    with pytest.raises(Fenced):
        publisher.publish(0, 0)
    assert not ledger.published


def test_bytes_are_deleted_only_outside_the_window_and_the_checkpoints(config, ledger, policy, tmp_path):
    publisher = Publisher(config, policy, ledger, ledger.term)
    for version in range(10):
        publisher.publish(0, version)
    (tmp_path / "versions" / "1.0.0123456789ab").mkdir()
    deleted = publisher.retain(0, 9, 2, [3, 8])
    kept = sorted(int(name.split(".")[1]) for name in names(tmp_path) if name.startswith("0."))
    assert kept == [0, 3, 6, 7, 8, 9]
    assert len(deleted) == 4 and "1.0.0123456789ab" in names(tmp_path)
    assert publisher.retain(0, 9, 2, [3, 8]) == []
    behind = publisher.retain(1, 11, 2, [8])
    assert [name.rsplit(".", 1)[0] for name in behind] == ["0.3", "0.6", "0.7"], "older lineages go by the same rule"


def test_what_a_successor_is_writing_is_left_alone(config, ledger, policy, tmp_path):
    epoch = ledger.term.epoch
    for name in (f"tmp.0.1.{epoch}.0123abcd", f"tmp.0.1.{epoch + 1}.0123abcd"):
        (tmp_path / "versions" / name).mkdir(parents=True)
    Publisher(config, policy, ledger, ledger.term)
    assert names(tmp_path) == [f"tmp.0.1.{epoch + 1}.0123abcd"]
