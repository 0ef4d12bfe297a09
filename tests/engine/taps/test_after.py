"""A patch that acts after its tap was recorded: the record is the operation's own, what follows is the patch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.ranks.messages import StagePatch
from lockstep.engine.ranks.wire import WireArray
from tests.engine.harness import Engine, Pass

PROMPTS = [[3, 130, 17, 99], [9, 9, 8]]
STEPS = 3
TAPS = [
    "embed", "layers.0.attn_norm", "layers.0.attn.k_proj", "layers.1.attn.v_proj", "layers.0.attn.q_norm",
    "layers.1.attn.k_rope", "layers.0.attn.k_cache", "layers.2.attn.v_cache", "layers.1.attn.scores",
    "layers.0.attn.probs", "layers.1.attn.context", "layers.0.attn.o_proj.partial", "layers.0.attn.o_proj",
    "layers.1.attn_residual", "layers.1.mlp.gate", "layers.2.mlp.down", "layers.2.mlp_residual", "final_norm",
]  # fmt: skip


def run(engine: Engine, patches: dict[int, StagePatch]) -> list[Pass]:
    engine.rules({})
    engine.client.patch([patches])
    return engine.generate(PROMPTS, STEPS)


def own(engine: Engine, plain: list[Pass], tap: str, after: bool) -> dict[int, StagePatch]:
    """Sequence 1's tensor of the last step, on every rank, overwritten by half of itself."""
    place = [spec.name for spec in engine.specs].index(tap)
    return {
        rank: StagePatch(
            place, 1, STEPS - 1, [(0, length) for length in part.shape],
            WireArray.of((part / 2).astype(np.float32), "float32"), after,
        )
        for rank, part in enumerate(plain[-1].parts(tap, 1))
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_record_is_the_operations_own_and_the_rest_is_as_under_a_patch(
    tp: int, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(tp)
    engine.load(variant("qwen3"))
    names = [spec.name for spec in engine.specs]
    engine.capture(*names, statistics=True)
    plain = run(engine, {})
    for tap in TAPS:
        before = run(engine, own(engine, plain, tap, after=False))
        after = run(engine, own(engine, plain, tap, after=True))
        place = names.index(tap)
        for early, reported in zip(plain[:-1], after[:-1], strict=True):
            assert (reported.checksums == early.checksums).all(), tap
        last = after[-1].checksums
        assert (last[:, : place + 1] == plain[-1].checksums[:, : place + 1]).all(), tap
        assert (last[:, place + 1 :] == before[-1].checksums[:, place + 1 :]).all(), tap
        assert (last[:, -1] != plain[-1].checksums[:, -1]).all(), tap  # something did follow
        for rank, part in enumerate(after[-1].parts(tap, 1)):
            assert np.array_equal(part, plain[-1].parts(tap, 1)[rank], equal_nan=True), tap
    engine.client.patch([])
