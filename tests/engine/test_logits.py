"""Final logits against transformers, for every family and feature: prefill and 32 decode steps, at TP=2 as many as it
takes to leave the windows, the contexts and a block of the cache behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from lockstep.workbench.references.loading import CACHE
from tests.checkpoints import ALIKE, ALIKE_WITH_EXPERTS, EVERY_VARIANT, tiny_checkpoint, tiny_model
from tests.engine.harness import Engine, Pass, reference_logits

pytestmark = pytest.mark.sampled_file(2)

STEPS = {1: 33, 2: 16, 4: 16}  # the prefill and the decode steps by TP, from 13 tokens on
TOLERANCE = 1e-4
PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]  # longer than the tiny windows (8)
RAGGED = [PROMPT, [9, 9, 8], [100, 2, 45, 61, 13, 7, 7]]


@lru_cache(maxsize=len(RAGGED))
def continuation(name: str, ids: tuple[int, ...]) -> tuple[torch.Tensor, list[int]]:
    """What the tiny model of `name` makes of `ids` in transformers: as many steps as any TP is held against. The next
    test is of the same model at another TP."""
    family, overrides = EVERY_VARIANT[name]
    model = tiny_model(family, **overrides, attn_implementation="eager")
    return reference_logits(model, ids, max(STEPS.values()))


def reference(name: str, ids: list[int], steps: int) -> tuple[torch.Tensor, list[int]]:
    """Its first `steps` steps."""
    logits, tokens = continuation(name, tuple(ids))
    return logits[:steps], tokens[:steps]


@pytest.mark.parametrize(
    ("name", "tp", "steps"),
    [
        pytest.param(name, tp, steps, marks=[pytest.mark.slow] * (tp not in quick or steps != STEPS[tp]))
        for name in EVERY_VARIANT
        for tp, steps in (*list(STEPS.items())[:2], (2, 33))
        for quick in [(2,) if name in (*ALIKE, *ALIKE_WITH_EXPERTS) else (1, 2)]
    ],
)
@pytest.mark.sampled(24)
def test_logits_match_transformers(
    name: str, tp: int, steps: int, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(tp)
    engine.load(variant(name))
    engine.capture("logits")
    passes = engine.generate([PROMPT], steps)
    golden, tokens = reference(name, PROMPT, steps)
    found = np.stack([one.logits() for one in passes])
    assert [one.token() for one in passes] == tokens
    assert np.abs(found - golden.numpy()).max() <= TOLERANCE


#: Rotary frequencies that change while the sequence grows, beyond 24 tokens; a width that no TP divides.
GROWING: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "longrope": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.5],
                "long_factor": [1.0, 2.0, 5.0, 9.0],
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "odd-width": ("llama", {"intermediate_size": 97, "mlp_bias": True}),
    "narrow": ("qwen3", {"intermediate_size": 5}),  # at TP=4 the last rank computes nothing of the MLP
}


def cached_reference(name: str, ids: list[int], steps: int) -> tuple[np.ndarray, list[int]]:
    """transformers' greedy continuation with a cache: keys stay as they were rotated when they were written."""
    family, overrides = GROWING[name]
    model = tiny_model(family, **overrides, attn_implementation="eager")
    rows, tokens, cache, given = [], [], DynamicCache(), ids
    with torch.inference_mode():
        for _ in range(steps):
            rows.append(model(torch.tensor([given]), use_cache=True, **{CACHE: cache}).logits[0, -1])
            given = [int(rows[-1].argmax())]
            tokens += given
    return torch.stack(rows).numpy(), tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "tp"),
    [pytest.param(name, tp, marks=[pytest.mark.slow] * (tp == 4)) for name in GROWING for tp in (1, 2, 4)],
)
def test_sequences_that_outgrow_their_context_and_odd_widths(
    name: str, tp: int, engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    """In a batch too, where each sequence has frequencies of its own."""
    engine = engine_of(tp)
    engine.load(tiny_checkpoint(tmp_path, GROWING[name][0], **GROWING[name][1]))
    engine.capture("logits")
    prompts = [PROMPT, PROMPT[:3]]
    passes = engine.generate(prompts, STEPS[tp])
    for seq, ids in enumerate(prompts):
        golden, tokens = cached_reference(name, ids, STEPS[tp])
        assert [one.token(seq) for one in passes] == tokens
        assert np.abs(np.stack([one.logits(seq) for one in passes]) - golden).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_prompt_in_chunks_is_rotated_as_the_whole(
    name: str, engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    engine = engine_of(1)
    engine.load(tiny_checkpoint(tmp_path, GROWING[name][0], **GROWING[name][1]), chunk_tokens=8)
    engine.capture("logits")
    prompt = PROMPT + PROMPT  # 26 tokens: only the last of four chunks reaches beyond 24
    passes = engine.generate([prompt], 6)[3:]
    golden, tokens = cached_reference(name, prompt, 3)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - golden).max() <= TOLERANCE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["qwen2-window", "llama-bias", "glm-moe-dsa"])
def test_a_ragged_batch_matches_each_sequence_alone(
    name: str, tp: int, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(tp)
    engine.load(variant(name))
    engine.capture("logits")
    passes = engine.generate(RAGGED, STEPS[tp])
    for seq, ids in enumerate(RAGGED):
        golden, tokens = reference(name, ids, STEPS[tp])
        found = np.stack([one.logits(seq) for one in passes])
        assert [one.token(seq) for one in passes] == tokens
        assert np.abs(found - golden.numpy()).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("tp", "dtype"),
    [
        *[(tp, dtype) for dtype in ("float32", "bfloat16") for tp in (1, 2)],
        pytest.param(8, "bfloat16", marks=pytest.mark.slow),
        (1, "float16"),
    ],
)
def test_a_sequence_is_bit_equal_alone_and_in_a_batch(
    tp: int, dtype: str, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(tp)

    def run(prompts: list[list[int]]) -> list[Pass]:
        engine.load(variant("qwen2-tied"), dtype=dtype, batch_invariant=True)
        engine.capture("logits")
        return engine.generate(prompts, 6)

    together = run(RAGGED)
    for seq, ids in enumerate(RAGGED):
        for alone, one in zip(run([ids]), together, strict=True):
            assert np.array_equal(alone.logits(), one.logits(seq)), f"sequence {seq}"


@pytest.mark.slow
def test_more_ranks_than_kv_heads_and_ranks_without_vocabulary(
    engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    """At TP=8 four ranks share each KV head, and with 9 tokens three ranks own no row of the vocabulary."""
    changes = {"vocab_size": 9, "tie_word_embeddings": False}
    path = tiny_checkpoint(tmp_path, "qwen2", **changes)
    engine = engine_of(8)
    engine.load(path)
    engine.capture("logits", statistics=True)
    passes = engine.generate([[3, 8, 1, 4]], 12)
    model = tiny_model("qwen2", **changes, attn_implementation="eager")
    golden, tokens = reference_logits(model, [3, 8, 1, 4], 12)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - golden.numpy()).max() <= TOLERANCE
    for one in passes:
        for place, spec in enumerate(engine.specs):
            sums = one.checksums[:, place]
            if spec.layout.kind == "replicate":
                assert len(set(sums)) == 1, f"{spec.name} differs between ranks"
            elif spec.layout.replicas > 1:
                groups = sums.reshape(-1, spec.layout.replicas)
                assert (groups == groups[:, :1]).all(), f"replicas of {spec.name} differ"
