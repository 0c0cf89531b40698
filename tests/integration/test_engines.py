"""Both engines on the tiny model: what they record is what a plain forward computes, also after weight updates.

One vLLM engine serves the whole session, in this process; the import alone takes half a minute.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollbook.core.config import WorkerConfig
from rollbook.core.errors import ConfigError, DigestMismatch, InvalidRequest, NotReady, StaleWeights, UnsupportedSampling
from rollbook.core.packing import unpack_f32, unpack_i32
from rollbook.core.ports import Engine, Generation, GenerationRequest, SamplingSettings
from rollbook.core.records import FinishReason, PolicyVersion, SlotKey
from rollbook.core.weights import safetensors_digest
from rollbook.learner.model import load_policy
from rollbook.observe import metrics
from rollbook.observe.engine_metrics import EngineCollector
from rollbook.rollout.engines import make_engine
from rollbook.rollout.model_files import read_model_files
from rollbook.rollout.probe import check_probe, load_verified
from rollbook.rollout.transformers_engine import TransformersEngine, sample_uniforms
from rollbook.rollout.weights import read_weights, weights_digest
from rollout_doubles import EOS, SORT_DIGITS, worker_config

AT_08 = SamplingSettings(temperature=0.8, max_new_tokens=13)
PROBE_IDS = [*b"sort 73915:13579", EOS]


def prompt_ids(rng: random.Random) -> tuple[int, ...]:
    return tuple(f"sort {''.join(rng.choices('0123456789', k=rng.randint(4, 8)))}:".encode())


def make_requests(groups: int, siblings: int, seed: int = 0) -> list[GenerationRequest]:
    rng = random.Random(seed)
    prompts = [prompt_ids(rng) for _ in range(groups)]
    return [
        GenerationRequest(SlotKey(i, j), prompt, rng.randrange(2**31))
        for i, prompt in enumerate(prompts)
        for j in range(siblings)
    ]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Version 0 as shipped and three updates, each a visible step away from the one before."""
    root = tmp_path_factory.mktemp("versions")
    weights = load_file(SORT_DIGITS / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    out = []
    for version in range(4):
        directory = root / str(version)
        directory.mkdir()
        save_file(weights, directory / "model.safetensors")
        out.append(directory)
        weights = {k: w + 0.02 * torch.randn(w.shape, generator=generator) for k, w in weights.items()}
    return out


@pytest.fixture(scope="module")
def references(versions: list[Path]) -> list[torch.nn.Module]:
    """A plain float64 model of each version, loaded by transformers itself from a directory of its own."""
    models = []
    for version in versions:
        directory = version.parent / f"reference-{version.name}"
        shutil.copytree(SORT_DIGITS, directory)
        shutil.copy(version / "model.safetensors", directory)
        models.append(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval())
    return models


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Engines already made in this module; closed with it, as vLLM's process group is the whole process's."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        engine.close()


def engine_named(name: str, built: dict[str, Engine], run_dir: Path) -> Engine:
    kinds = {
        "vllm": {"engine": "vllm", "slots": 128, "max_model_len": 64},
        "float64": {"engine": "transformers", "dtype": "float64", "max_model_len": 64},
        "bfloat16": {"engine": "transformers", "dtype": "bfloat16", "max_model_len": 64},
        "float32": {"engine": "transformers", "dtype": "float32", "max_model_len": 64},
    }
    if name == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: pip install rollbook[cpu]")
    if name not in built:
        config = worker_config(run_dir, workers=[kinds[name]])
        with patch.object(metrics, "is_shown", lambda role: True):  # vLLM counts for itself then
            built[name] = make_engine(config, config.workers[0])
    return built[name]


@pytest.fixture(params=["float64", "float32", "vllm"])
def engine(request: pytest.FixtureRequest, built: dict[str, Engine], tmp_path: Path) -> Engine:
    return engine_named(request.param, built, tmp_path)


@pytest.fixture
def transformers_engine(built: dict[str, Engine], tmp_path: Path) -> Any:
    return engine_named("float64", built, tmp_path)


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, prompt: tuple[int, ...], completion: list[int], temperature: float) -> list[float]:
    """Log-prob of each completion token by one forward over the whole sequence, no cache, no padding, no batch."""
    ids = torch.tensor([[*prompt, *completion]])
    logp = (model(input_ids=ids, use_cache=False).logits[0].double() / temperature).log_softmax(-1)
    return [logp[len(prompt) - 1 + t, token].item() for t, token in enumerate(completion)]


def largest_gap(model: torch.nn.Module, requests: list[GenerationRequest], made: list[Generation], temperature: float) -> float:
    gap = 0.0
    for request, generation in zip(requests, made, strict=True):
        completion = list(unpack_i32(generation.trajectory.token_ids))
        recorded = unpack_f32(generation.trajectory.logprobs)
        expected = plain_logprobs(model, request.prompt_ids, completion, temperature)
        gap = max(gap, *(abs(a - b) for a, b in zip(recorded, expected, strict=True)))
    return gap


def probe_of(model: torch.nn.Module) -> str:
    return json.dumps({"token_ids": PROBE_IDS, "logprobs": plain_logprobs(model, tuple(PROBE_IDS[:1]), PROBE_IDS[1:], 1.0)})


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_recorded_logprobs_are_those_of_a_plain_forward_after_three_updates(
    engine: Engine, versions: list[Path], references: list[torch.nn.Module], ignore_eos: bool
) -> None:
    requests = make_requests(8, 4)
    settings = SamplingSettings(0.8, 13, ignore_eos)
    for version, (directory, model) in enumerate(zip(versions, references, strict=True)):
        engine.load(str(directory), version)
        made = engine.generate(requests, settings)
        assert [g.key for g in made] == [r.key for r in requests]
        assert largest_gap(model, requests, made, 0.8) < 1e-4
        assert {v for g in made for v in unpack_i32(g.trajectory.versions)} == {version}
        tokens = [list(unpack_i32(g.trajectory.token_ids)) for g in made]
        if ignore_eos:
            assert {len(t) for t in tokens} == {13} and {g.finish_reason for g in made} == {FinishReason.LENGTH}
            assert any(EOS in t[:-1] for t in tokens)
        else:
            for ids, generation in zip(tokens, made, strict=True):
                assert EOS not in ids[:-1]
                assert (generation.finish_reason is FinishReason.STOP) == (ids[-1] == EOS)
                assert ids[-1] == EOS or len(ids) == 13


@torch.no_grad()
def test_after_three_updates_the_trainer_gives_the_engine_logprobs_and_the_mean_ratio_is_one(
    engine: Engine, versions: list[Path], tmp_path: Path
) -> None:
    policy = load_policy(worker_config(tmp_path, sampling={"temperature": 0.8, "max_new_tokens": 13}))
    for version, directory in enumerate(versions):
        engine.load(str(directory), version)
    policy.model.load_state_dict(load_file(versions[3] / "model.safetensors"), strict=False)
    requests = make_requests(16, 8)
    made = engine.generate(requests, AT_08)
    rows = [[*request.prompt_ids, *unpack_i32(g.trajectory.token_ids)] for request, g in zip(requests, made, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.arange(13) < torch.tensor([[g.trajectory.n_tokens] for g in made])
    logp_old, _ = policy.completion_logprobs(tokens, torch.tensor([len(r.prompt_ids) for r in requests]), mask)
    logp_mu = torch.cat([torch.tensor(unpack_f32(g.trajectory.logprobs)) for g in made])
    gap = logp_old[mask] - logp_mu
    assert gap.abs().max().item() < 1e-4
    assert abs(gap.exp().mean().item() - 1.0) < 1e-3


def test_both_ways_to_finish_occur_in_what_the_tests_sample(engine: Engine, versions: list[Path]) -> None:
    engine.load(str(versions[3]), 3)
    reasons = {g.finish_reason for g in engine.generate(make_requests(8, 4), AT_08)}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_scores_are_those_of_a_plain_forward(engine: Engine, versions: list[Path], references: list[torch.nn.Module]) -> None:
    for version in (2, 1):
        engine.load(str(versions[version]), version)
        expected = plain_logprobs(references[version], tuple(PROBE_IDS[:1]), PROBE_IDS[1:], 1.0)
        assert engine.score(PROBE_IDS) == pytest.approx(expected, abs=1e-4)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(engine: Engine, versions: list[Path]) -> None:
    engine.load(str(versions[2]), 2)
    requests = make_requests(8, 4)
    first = engine.generate(requests, AT_08)
    assert [g.trajectory.token_ids for g in engine.generate(requests, AT_08)] == [g.trajectory.token_ids for g in first]
    others = [GenerationRequest(r.key, r.prompt_ids, r.seed ^ 1) for r in requests]
    assert [g.trajectory.token_ids for g in engine.generate(others, AT_08)] != [g.trajectory.token_ids for g in first]


def test_sampled_frequencies_are_the_recorded_probabilities(
    engine: Engine, versions: list[Path], references: list[torch.nn.Module]
) -> None:
    engine.load(str(versions[3]), 3)
    prompt, n = tuple(b"sort 7391:"), 4096
    made = engine.generate([GenerationRequest(SlotKey(0, i), prompt, 977 * i) for i in range(n)], SamplingSettings(1.5, 1))
    counts = np.bincount([unpack_i32(g.trajectory.token_ids)[0] for g in made], minlength=272)
    with torch.no_grad():
        logits = references[3](input_ids=torch.tensor([prompt])).logits[0, -1].double()
    p = (logits / 1.5).softmax(-1).numpy()
    assert np.all(np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 3)
    assert np.count_nonzero(counts) > 10


def test_the_digest_of_what_was_loaded_is_the_digest_of_the_file(engine: Engine, versions: list[Path]) -> None:
    file = versions[1] / "model.safetensors"
    digests = {engine.load(str(versions[1]), 1), weights_digest(versions[1]), weights_digest(file), safetensors_digest(file)}
    digests |= {weights_digest(load_file(file)), weights_digest(reversed(list(read_weights(file))))}
    assert len(digests) == 1
    assert weights_digest(versions[2]) not in digests


def test_a_good_engine_passes_the_probe_of_its_version_and_fails_that_of_another(
    engine: Engine, versions: list[Path], references: list[torch.nn.Module], tmp_path: Path
) -> None:
    for version in (0, 3):
        row = PolicyVersion(0, version, weights_digest(versions[version]), versions[version].name, probe_of(references[version]))
        load_verified(engine, row, str(versions[version].parent), 1e-3)
    with pytest.raises(StaleWeights, match="nats per token"):
        check_probe(engine, probe_of(references[2]), 1e-3)
    wrong = PolicyVersion(0, 3, weights_digest(versions[2]), versions[3].name, probe_of(references[3]))
    with pytest.raises(DigestMismatch):
        load_verified(engine, wrong, str(versions[3].parent), 1e-3)


def keep_old_head(engine: Any) -> Any:
    """Make the next load leave the head as it is, as engines with a second copy of a tied head have done; returns the undo."""
    if isinstance(engine, TransformersEngine):
        head, load = engine._model.lm_head, engine.load
        old, tied = torch.nn.Parameter(head.weight.detach().clone()), head.weight

        def stale_load(weights_dir: str, version: int) -> str:
            digest = load(weights_dir, version)
            head.weight = old
            return digest

        engine.load = stale_load

        def undo() -> None:
            head.weight = tied
            del engine.load

        return undo
    head, load_weights = engine._model.lm_head, engine._load_weights
    packed = head.cpu_linear

    def stale(weights: Any) -> Any:
        loaded = load_weights(weights)
        head.cpu_linear = packed
        return loaded

    engine._load_weights = stale
    return lambda: delattr(engine, "_load_weights")


def test_a_head_that_keeps_its_old_values_is_caught_although_the_digest_is_right(
    engine: Engine, versions: list[Path], references: list[torch.nn.Module]
) -> None:
    engine.load(str(versions[0]), 0)
    row = PolicyVersion(0, 1, weights_digest(versions[1]), versions[1].name, probe_of(references[1]))
    undo = keep_old_head(engine)
    try:
        with pytest.raises(StaleWeights, match="nats per token"):
            load_verified(engine, row, str(versions[1].parent), 1e-3)
    finally:
        undo()
    load_verified(engine, row, str(versions[1].parent), 1e-3)


def test_float64_results_do_not_depend_on_the_batch(transformers_engine: TransformersEngine, versions: list[Path]) -> None:
    engine = transformers_engine
    engine.load(str(versions[3]), 3)
    requests = make_requests(16, 8, seed=5)
    whole = engine.generate(requests, AT_08)
    assert len({g.trajectory.n_tokens for g in whole}) > 3
    groups = [g for start in range(0, 128, 8) for g in engine.generate(requests[start : start + 8], AT_08)]
    alone = [engine.generate([r], AT_08)[0] for r in requests]
    shuffled = random.Random(1).sample(range(128), 128)
    other_order = engine.generate([requests[i] for i in shuffled], AT_08)
    assert groups == whole
    assert alone == whole
    assert other_order == [whole[i] for i in shuffled]


def test_a_longer_limit_extends_a_completion_and_changes_none_of_it(
    transformers_engine: TransformersEngine, versions: list[Path]
) -> None:
    transformers_engine.load(str(versions[3]), 3)
    requests = make_requests(4, 4)
    short = transformers_engine.generate(requests, SamplingSettings(1.0, 5))
    long = transformers_engine.generate(requests, SamplingSettings(1.0, 20))
    for a, b in zip(short, long, strict=True):
        assert b.trajectory.token_ids.startswith(a.trajectory.token_ids)
        assert b.trajectory.logprobs.startswith(a.trajectory.logprobs)


def test_a_request_has_a_bound_of_its_own_within_that_of_the_settings(engine: Engine, versions: list[Path]) -> None:
    engine.load(str(versions[1]), 1)
    free = make_requests(4, 2)
    bounds = [1, 2, 3, None, 13, 1, 5, 4]
    bound = [dataclasses.replace(request, max_new_tokens=n) for request, n in zip(free, bounds, strict=True)]
    whole, cut = engine.generate(free, AT_08), engine.generate(bound, AT_08)
    for n, a, b in zip(bounds, whole, cut, strict=True):
        kept = min(n or 13, a.trajectory.n_tokens)
        assert b.trajectory.token_ids == a.trajectory.token_ids[: 4 * kept]
        ended = kept == a.trajectory.n_tokens
        assert b.finish_reason is (a.finish_reason if ended else FinishReason.LENGTH)
    for wrong in (0, 14):
        with pytest.raises(InvalidRequest, match="max_new_tokens"):
            engine.generate([dataclasses.replace(free[0], max_new_tokens=wrong)], AT_08)


def test_bfloat16_stays_near_the_plain_forward(
    built: dict[str, Engine], versions: list[Path], references: list[torch.nn.Module], tmp_path: Path
) -> None:
    engine = engine_named("bfloat16", built, tmp_path)
    engine.load(str(versions[1]), 1)
    requests = make_requests(8, 4)
    assert 1e-6 < largest_gap(references[1], requests, engine.generate(requests, AT_08), 0.8) < 0.3


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    assert np.array_equal(sample_uniforms(7, 5), sample_uniforms(7, 50)[:5])
    assert not np.array_equal(sample_uniforms(7, 5), sample_uniforms(8, 5))
    many = np.concatenate([sample_uniforms(seed, 64) for seed in range(500)])
    assert 0 < many.min() and many.max() <= 1 and abs(many.mean() - 0.5) < 0.01


def test_greedy_takes_the_most_likely_token_of_a_plain_forward(
    transformers_engine: TransformersEngine, versions: list[Path], references: list[torch.nn.Module]
) -> None:
    transformers_engine.load(str(versions[1]), 1)
    requests = make_requests(4, 1)
    for request, made in zip(requests, transformers_engine.greedy(requests, 13), strict=True):
        ids = list(request.prompt_ids)
        for token in unpack_i32(made.trajectory.token_ids):
            with torch.no_grad():
                assert token == references[1](input_ids=torch.tensor([ids])).logits[0, -1].argmax()
            ids.append(token)
        assert (made.finish_reason is FinishReason.STOP) == (ids[-1] == EOS)


def test_what_an_engine_would_change_in_silence_is_refused(engine: Engine, versions: list[Path]) -> None:
    engine.load(str(versions[0]), 0)
    request = make_requests(1, 1)[0]
    with pytest.raises(UnsupportedSampling, match="greedy"):
        engine.generate([request], SamplingSettings(0.0, 4))
    fits = GenerationRequest(SlotKey(0, 0), (49,) * 51, 1)
    assert len(engine.generate([fits], AT_08)) == 1
    for prompt in ((49,) * 52, (), (272,), (-1,)):
        with pytest.raises(InvalidRequest, match=r"slot 0\.0"):
            engine.generate([GenerationRequest(SlotKey(0, 0), prompt, 1)], AT_08)
    assert engine.generate([], AT_08) == []


def test_vllm_refuses_temperatures_it_would_raise(built: dict[str, Engine], versions: list[Path], tmp_path: Path) -> None:
    engine = engine_named("vllm", built, tmp_path)
    engine.load(str(versions[0]), 0)
    with pytest.raises(UnsupportedSampling, match="0.01"):
        engine.generate(make_requests(1, 1), SamplingSettings(0.0099, 4))
    assert len(engine.generate(make_requests(1, 1), SamplingSettings(0.01, 4))) == 1


def test_vllms_own_metrics_call_the_model_by_its_name_and_not_by_its_place(
    built: dict[str, Engine], versions: list[Path], tmp_path: Path
) -> None:
    engine = engine_named("vllm", built, tmp_path)
    engine.load(str(versions[0]), 0)
    engine.generate(make_requests(2, 2), AT_08)
    found = {sample.name: sample for family in EngineCollector().collect() for sample in family.samples}
    assert found["vllm:generation_tokens_total"].value > 0
    assert {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"} <= set(found)
    assert {sample.labels.get("model_name", SORT_DIGITS.name) for sample in found.values()} == {SORT_DIGITS.name}
    assert not [sample for sample in found.values() if any("/" in value for value in sample.labels.values())]


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "cut", "none"])
def test_weights_that_do_not_fit_are_refused_and_nothing_is_sampled_until_others_are_loaded(
    engine: Engine, versions: list[Path], tmp_path: Path, damage: str
) -> None:
    weights, file = load_file(versions[0] / "model.safetensors"), tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    if damage == "missing":
        del weights[name]
    elif damage == "unknown":
        weights["model.layers.7.mlp.down_proj.weight"] = weights[name].clone()
    elif damage == "shape":
        weights[name] = weights[name][:, :8].contiguous()
    if damage != "none":
        save_file(weights, file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    expected = {"cut": DigestMismatch, "none": NotReady}.get(damage, StaleWeights)
    with pytest.raises(expected):
        engine.load(str(tmp_path), 1)
    with pytest.raises(NotReady):
        engine.generate(make_requests(1, 1), AT_08)
    with pytest.raises(NotReady):
        engine.score(PROBE_IDS)
    engine.load(str(versions[0]), 0)
    assert len(engine.generate(make_requests(1, 1), AT_08)) == 1


def test_a_tied_head_may_be_in_the_file_when_it_agrees_with_the_embedding(
    transformers_engine: TransformersEngine, versions: list[Path], tmp_path: Path
) -> None:
    weights = load_file(versions[2] / "model.safetensors")
    transformers_engine.load(str(versions[2]), 2)
    expected = transformers_engine.score(PROBE_IDS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    transformers_engine.load(str(tmp_path), 2)
    assert transformers_engine.score(PROBE_IDS) == expected
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(StaleWeights, match="tied"):
        transformers_engine.load(str(tmp_path), 2)


def test_a_manifest_names_what_changes_numbers(engine: Engine) -> None:
    manifest = json.loads(json.dumps(engine.manifest()))
    assert {"engine", "device", "dtype", "threads", "torch", "eos_ids", "max_model_len"} <= manifest.keys()
    assert manifest["eos_ids"] == [EOS]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"engine": "transformers", "device": "tpu"}, "device = 'tpu'"),
        ({"engine": "transformers", "dtype": "int8"}, "dtype = 'int8'"),
        ({"engine": "vllm", "device": "tpu"}, "device = 'tpu'"),
        ({"engine": "vllm", "dtype": "float64"}, "dtype = 'float64'"),
        ({"engine": "vllm", "batch_invariant": True}, "needs device = 'cuda'"),
        ({"engine": "sglang"}, "'transformers' or 'vllm'"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_by_name(tmp_path: Path, kind: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(worker_config(tmp_path), WorkerConfig(**kind))


def test_a_directory_without_a_model_is_refused_naming_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        read_model_files(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"config\.json, \*\.safetensors missing"):
        read_model_files(str(tmp_path))
    shutil.copy(SORT_DIGITS / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"model directory: \*\.safetensors missing"):
        read_model_files(str(tmp_path))
    shutil.copy(SORT_DIGITS / "model.safetensors", tmp_path)
    assert read_model_files(str(tmp_path)).eos_ids == (EOS,)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_model_files(str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert read_model_files(str(tmp_path)).eos_ids == (4, 9)
