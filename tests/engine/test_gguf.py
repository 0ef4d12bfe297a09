"""Models out of GGUF files: logits and tokens of transformers on the same weights, at any parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lockstep.engine.checkpoint.load import shards_of
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.parallel import shards
from tests.checkpoints import VARIANTS, tiny_model
from tests.engine.harness import Engine, reference_logits
from tests.gguf_twins import gguf_twin

STEPS = 9
PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]
STORIES = Path(__file__).parents[3] / "shared/data/stories260K/stories260K.gguf"
#: llama2.c's own continuation of "Once upon a time".
ONCE = [1, 403, 407, 261, 378]
GREEDY = [432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426, 338, 401, 396, 267, 337, 410, 408, 419, 292, 411,
          322, 265, 282, 295, 433, 426, 385, 328, 432]  # fmt: skip


def _reference(name: str, kind: str) -> tuple[torch.Tensor, list[int]]:
    """transformers on the tiny model's weights as gguf-py quantises and dequantises them."""
    family, overrides = VARIANTS[name]
    model = tiny_model(family, **overrides, attn_implementation="eager")
    stored = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                encoded = gguf.quants.quantize(parameter.numpy(), stored)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(encoded, stored).copy()))
    return reference_logits(model, PROMPT, STEPS)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "F32"),
        ("llama-bias", "Q8_0"),
        ("llama-llama3", "F32"),
        ("llama-yarn", "F16"),
        ("llama-linear", "BF16"),
        ("mistral-window", "Q8_0"),
        ("qwen2-tied", "Q5_0"),
        ("qwen3", "Q4_0"),
    ],
)
def test_logits_are_those_of_transformers(
    name: str,
    kind: str,
    tp: int,
    engine_of: Callable[[int], Engine],
    variant: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    engine = engine_of(tp)
    engine.load(gguf_twin(variant(name), tmp_path / "twin.gguf", kind))
    engine.capture("logits")
    passes = engine.generate([PROMPT], STEPS)
    golden, tokens = _reference(name, kind)
    assert [one.token() for one in passes] == tokens
    assert np.abs(np.stack([one.logits() for one in passes]) - golden.numpy()).max() <= 1e-4


@pytest.mark.skipif(not STORIES.is_file(), reason="the shared data is not there")
@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_stories260k_reports_the_known_story(tp: int, engine_of: Callable[[int], Engine]) -> None:
    engine = engine_of(tp)
    engine.load(STORIES)
    engine.capture("logits")
    passes = engine.generate([ONCE], len(GREEDY))
    assert [one.token() for one in passes] == GREEDY
    first = passes[0].logits()
    known = {432: 17.7994, 383: 14.2813, 322: 9.7097, 353: 9.5873, 323: 9.1342}
    assert {token: round(float(first[token]), 4) for token in known} == pytest.approx(known, abs=2e-4)


def test_a_rank_reads_its_blocks_alone(variant: Callable[[str], Path], tmp_path: Path) -> None:
    model, source = open_checkpoint(gguf_twin(variant("llama"), tmp_path / "twin.gguf", "Q8_0"))
    whole = {name: source.read(name) for name in source.names()}
    for rank in range(2):
        before = source.bytes_read
        for name, tensor in shards_of(source, model, 2, rank, dtype="float32"):
            plan = shards.plan(name, model, 2, rank)
            expected = whole[name]
            if plan.dim is not None:
                expected = expected.narrow(plan.dim, plan.span.start, plan.span.size)
            assert torch.equal(tensor, expected), name
        # Half of each matrix; down_proj's 48 of 96 columns are one and a half blocks of 32, so that two are read of
        # three; the vocabulary of 131 is 66 and 65 rows; norms whole.
        row = 64 // 32 * 34
        layer = row * (32 + 16 + 16 + 48 + 48) + 64 * 34 + 64 * 2 * 34 + 2 * 64 * 4
        assert source.bytes_read - before == 3 * layer + 2 * row * (66 - rank) + 64 * 4
