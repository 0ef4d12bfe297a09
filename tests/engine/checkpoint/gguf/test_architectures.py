"""Every architecture against its Hugging Face original: configuration, bits of weights, logits of the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lockstep.engine.checkpoint.gguf.architectures import PATTERN
from lockstep.engine.checkpoint.gguf.source import GgufSource, open_gguf
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_frequencies import frequencies
from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from tests.checkpoints import tiny_checkpoint
from tests.engine.harness import local_runner
from tests.gguf_twins import CONVERTIBLE, gguf_twin

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]  # beyond every window
FORCED = [9, 110, 23]
#: What only one of the formats states, or states in single precision.
APART = {"bos_id", "eos_ids", "block_types", "notes", "rms_eps", "rope_scaling", "layer_ropes", "score_scale",
         "residual_multiplier", "rope_theta"}  # fmt: skip


def twins(folder: Path, name: str, kind: str = "F32") -> tuple[Path, Path]:
    family, overrides = CONVERTIBLE[name]
    original = tiny_checkpoint(folder, family, **overrides)
    return original, gguf_twin(original, folder / "twin.gguf", kind)


def rotations(model: ModelConfig) -> list[list[float]]:
    """Of each layer its angles per position and the factor on what is rotated, in a short and in a long sequence."""
    found = []
    for layer in range(model.num_layers):
        one = model.of_layer(layer)
        for length in (1, model.max_position) if one.rotary_dim else ():
            angles, factor = frequencies(one, one.rope_theta, length, np.array)
            found.append([*angles.tolist(), factor])
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_a_twin_is_its_original(name: str, tmp_path: Path) -> None:
    original, twin = twins(tmp_path, name)
    (theirs, expected), (model, source) = open_checkpoint(original), open_checkpoint(twin)
    if (
        theirs.family == "nemotron_h" and theirs.mamba is not None
    ):  # llama.cpp has no limits, the original next to none
        theirs = replace(theirs, mamba=replace(theirs.mamba, limits=(0.0, math.inf)))
    for key in set(ModelConfig.__slots__) - APART:
        assert getattr(model, key) == getattr(theirs, key), key
    assert model.scale == pytest.approx(theirs.scale, rel=1e-7)
    assert model.residual_multiplier == pytest.approx(theirs.residual_multiplier, rel=1e-7)
    for ours, right in zip(rotations(model), rotations(theirs), strict=True):
        assert ours == pytest.approx(right, rel=1e-6)
    verify(source, model)
    assert isinstance(source, GgufSource)
    assert source.names() == expected.names() - {"lm_head.weight"} | (
        set() if model.tie_embeddings else {"lm_head.weight"}
    )
    for tensor in source.names():
        right = expected.read(tensor)
        # As the file rounds it.
        if model.norms_add_one and tensor.endswith("norm.weight") and "linear_attn" not in tensor:
            right = (right + 1) - 1
        if tensor.endswith("A_log"):
            right = right.exp().double().log().float()
        assert torch.equal(source.read(tensor), right), tensor
        assert torch.equal(torch.from_numpy(source.rows(tensor)), right), tensor
        if not right.dim():
            continue
        part = Span(len(right) // 4, len(right) // 2)
        assert torch.equal(source.read(tensor, 0, part), right[part.start : part.stop]), tensor


def logits(path: Path, **config: Any) -> list[np.ndarray]:
    """Of a prefill and the decode steps."""
    runner = local_runner(path, max_tokens=64, **config)
    tap = runner.hub.places["logits"]
    runner.watch(CapturePolicy(False, {tap: "full"}))
    runner.add(0, PROMPT, Sampling())
    steps = [runner.step({0: token}) for token in FORCED]
    return [step.captured[0].tensor.numpy() for step in steps]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_the_engine_computes_the_same_from_both(name: str, tmp_path: Path) -> None:
    original, twin = twins(tmp_path, name)
    for ours, theirs in zip(logits(twin), logits(original), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("name", ["phi3", "glm4", "qwen3-next", "qwen3.5"])
def test_stacks_stay_in_blocks_as_well(name: str, tmp_path: Path) -> None:
    _, twin = twins(tmp_path, name, "Q8_0")
    for kept, dense in zip(logits(twin, weights="quantised"), logits(twin), strict=True):
        np.testing.assert_allclose(kept, dense, atol=2e-5 * np.abs(dense).max(), rtol=0)


def test_windows_by_a_list_of_layers(tmp_path: Path) -> None:
    family, overrides = CONVERTIBLE["gemma3"]
    original = tiny_checkpoint(tmp_path, family, **overrides)
    stated = [True, False, False, True, True, False, True]
    keys = {f"gemma3.{PATTERN}": stated}
    model = open_gguf(gguf_twin(original, tmp_path / "twin.gguf", keys=keys))[0]
    assert [window is not None for window in model.windows] == stated
    assert {window for window in model.windows if window} == {8}
    assert [rope.theta for rope in model.layer_ropes if rope] == [1e4 if one else 1e6 for one in stated]


def test_the_largest_gemma_scales_scores_by_another_width(tmp_path: Path) -> None:
    """llama.cpp knows it by its number of layers: Gemma-2 27B has 46, its query_pre_attn_scalar is hidden / heads."""
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "gemma2")
    writer.add_block_count(46)
    writer.add_context_length(8192)
    writer.add_embedding_length(4608)
    writer.add_feed_forward_length(36864)
    writer.add_head_count(32)
    writer.add_head_count_kv(16)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = open_gguf(tmp_path / "large.gguf")[0]
    assert model.scale == 144**-0.5
    assert (model.score_cap, model.logit_cap, model.windows[:3]) == (50.0, 30.0, (4096, None, 4096))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("xielu.eps", None, "xielu.eps is missing"),
        ("xielu.beta", [0.5], "xielu.beta: expected a finite number for each of 2 layers"),
        ("xielu.alpha_p", [float("nan"), 1.0], "xielu.alpha_p: expected a finite number"),
    ],
)
def test_a_layer_without_the_numbers_of_its_activation_is_refused(
    key: str, value: list[float] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = gguf.GGUFWriter.add_array

    def changed(writer: gguf.GGUFWriter, name: str, each: list[float]) -> None:
        if name != key or value is not None:
            write(writer, name, each if name != key or value is None else value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_array", changed)
    with pytest.raises(ConfigError, match=message):
        open_gguf(twins(tmp_path, "apertus")[1])


def test_one_number_for_the_activations_of_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = gguf.GGUFWriter.add_float32
    monkeypatch.setattr(gguf.GGUFWriter, "add_array", lambda writer, name, each: write(writer, name, each[0]))
    source = open_gguf(twins(tmp_path, "apertus")[1])[1]
    first, second = (source.read(f"model.layers.{i}.mlp.act_fn.beta") for i in range(2))
    assert torch.equal(first, second)


def test_keys_that_a_layer_of_gemma_4_does_not_make_are_left_unread(tmp_path: Path) -> None:
    """Published checkpoints hold them for layers that read those of others, and so do their files."""
    family, overrides = CONVERTIBLE["gemma4"]
    original = tiny_checkpoint(tmp_path, family, **overrides)
    further = {"blk.5.attn_k.weight": np.zeros((64, 64), np.float32)}
    model, source = open_gguf(gguf_twin(original, tmp_path / "twin.gguf", further=further))
    verify(source, model)
    assert model.notes == (
        "ignored blk.5.attn_k and others: the layer reads the keys and values of another one",
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feed_forward_length", [96] * 5, "expected a whole number for each of 6 layers"),
        ("attention.head_count_kv", [4, 3, 4, 2, 4, 2], "3 does not divide attention.head_count = 8"),
        ("attention.shared_kv_layers", 5, "has none of its type before it to read"),
        ("attention.value_length_swa", 8, "attention.key_length_swa is 16"),
    ],
)
def test_what_gemma_4_does_not_do_is_refused(
    key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, overrides = CONVERTIBLE["gemma4"]
    write = gguf.GGUFWriter.add_key_value

    def changed(writer: gguf.GGUFWriter, name: str, stated: Any, *rest: Any, **further: Any) -> None:
        write(writer, name, value if name == f"gemma4.{key}" else stated, *rest, **further)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", changed)
    with pytest.raises(ConfigError, match=message):
        open_gguf(gguf_twin(tiny_checkpoint(tmp_path, family, **overrides), tmp_path / "twin.gguf"))
