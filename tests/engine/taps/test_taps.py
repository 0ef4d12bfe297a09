"""What the taps of a running engine report: every tap's statistics are those of the tensor that passed, on every
rank, and the layouts put the ranks' tensors together into what one rank alone has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.taps.names import STATISTICS
from tests.engine.harness import Engine, Pass

pytestmark = pytest.mark.sampled_file(2)

PROMPTS = [[3, 130, 17, 99, 4, 64, 5, 12, 77, 120], [9, 9, 8]]
NAMES = ["qwen2-window", "qwen3", "llama-bias"]


def run(engine: Engine, path: Path, prompts: list[list[int]], steps: int) -> list[Pass]:
    engine.load(path)
    engine.capture(*(spec.name for spec in engine.specs), statistics=True)
    return engine.generate(prompts, steps)


@pytest.mark.parametrize("tp", [1, 2])
def test_statistics_are_those_of_the_tensors(
    tp: int, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(tp)
    for one in run(engine, variant("qwen2-window"), PROMPTS, 3):
        for place, spec in enumerate(engine.specs):
            rows = one.parts(spec.name, 0), one.parts(spec.name, 1)
            for rank in range(tp):
                values = np.concatenate([x[rank].ravel() for x in rows]).astype(np.float64)
                finite = values[np.isfinite(values)]
                reported = dict(zip(STATISTICS, one.statistics[rank, place], strict=True))
                expected = {"min": finite.min(), "max": finite.max(), "absmax": np.abs(finite).max(),
                            "mean": finite.mean(), "rms": np.sqrt((finite**2).mean()), "nan": 0, "inf": 0,
                            "zeros": (values == 0).sum()}  # fmt: skip
                for name, value in expected.items():
                    assert reported[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (spec.name, rank, name)


def test_keys_that_an_indexer_leaves_out_are_no_infinities(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    """A prompt of ten tokens, of which a query attends to eight."""
    for one in run(engine_of(1), variant("deepseek-v32"), PROMPTS, 3):
        assert not one.statistics[..., STATISTICS.index("inf")].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_tensors_make_up_the_whole(
    name: str, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    alone = run(engine_of(1), variant(name), PROMPTS, 3)
    split = run(engine_of(2), variant(name), PROMPTS, 3)
    for one, two in zip(alone, split, strict=True):
        for spec in engine_of(2).specs:
            for seq in (0, 1):
                expected, found = one.tensor(spec.name, seq), two.tensor(spec.name, seq)
                assert found.shape == expected.shape, spec.name
                finite = np.isfinite(expected)
                assert (np.isfinite(found) == finite).all()
                assert np.abs(found[finite] - expected[finite]).max() <= 1e-4, spec.name


@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_equal_to_the_bit(
    name: str, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(2)
    for one in run(engine, variant(name), PROMPTS, 3):
        replicated = [i for i, spec in enumerate(engine.specs) if spec.layout.kind == "replicate"]
        assert replicated
        assert (one.checksums[0, replicated] == one.checksums[1, replicated]).all()


def test_the_last_row_alone_can_be_captured(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(1)
    taps = ["layers.0.mlp.act", "layers.1.attn.scores", "layers.1.attn.probs", "layers.2.attn.q_rope"]
    engine.load(variant("qwen2-window"))
    engine.capture(*taps, statistics=True)
    (whole,) = engine.generate(PROMPTS, 1)
    engine.rules({})
    engine.capture(last=taps, statistics=True)
    (last,) = engine.generate(PROMPTS, 1)
    for tap in taps:
        axis = 1 if tap.endswith(("scores", "probs")) else 0
        for seq in (0, 1):
            expected = whole.tensor(tap, seq).take([-1], axis)
            assert (last.tensor(tap, seq) == expected).all(), tap
            assert last.tensor(tap, seq).shape == expected.shape


def test_what_is_off_is_not_reported(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(1)
    engine.load(variant("qwen3"))
    (one,) = engine.generate(PROMPTS, 1)
    assert one.reports[0].tensors == []
    assert one.reports[0].stats is None
