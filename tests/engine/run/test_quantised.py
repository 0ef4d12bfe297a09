"""Weights that stay quantised in memory: the numbers of dense ones, in the file's own bytes.

Bit for bit in bfloat16; in float32 to rounding, as Q8_0 is multiplied by tiles, which are summed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.layers.q8_tiles import Q8Tiles
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.run.memory import check_loadable
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.parts import PARTS
from tests.checkpoints import tiny_checkpoint
from tests.engine.harness import Engine, local_runner
from tests.gguf_twins import gguf_twin

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4, 64, 5]
FORCED = [9, 110, 23]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An untied llama (whose q and k rows are permuted) in Q8_0, a tied qwen2 (with biases) in Q4_1.

    At two ranks down_proj's 96 columns are cut inside a block.
    """
    found = {}
    for family, kind in (("llama", "Q8_0"), ("qwen2", "Q4_1")):
        directory = tmp_path_factory.mktemp(family)
        checkpoint = tiny_checkpoint(
            directory, family, intermediate_size=96, tie_word_embeddings=family == "qwen2"
        )
        found[family] = gguf_twin(checkpoint, directory / "model.gguf", kind)
    return found


def measured(runner: Runner) -> tuple[np.ndarray, np.ndarray]:
    """Checksums [steps, taps] and statistics [steps, taps, parts]."""
    runner.watch(CapturePolicy(statistics=True))
    runner.add(0, PROMPT, Sampling())
    passes = [runner.step({0: token}) for token in FORCED]
    return np.stack([one.checksums for one in passes]), np.stack([one.stats for one in passes])


def assert_equal_to_rounding(found: np.ndarray, expected: np.ndarray) -> None:
    """Least, greatest and 2-norm of every tap, to 1e-5 of its norm."""
    parts = [PARTS.index(name) for name in ("min", "max", "norm")]
    there = expected[..., PARTS.index("finite")] > 0
    found, expected = found[there][:, parts], expected[there][:, parts]
    assert (np.abs(found - expected) <= 1e-5 * expected[:, -1:]).all()


def alone(path: Path, rules: Mapping[str, str], **config: str) -> Runner:
    return local_runner(path, rules, **config)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_tap_has_the_bits_of_the_dense_run(paths, family):
    dense, _ = measured(alone(paths[family], {}, dtype="bfloat16"))
    kept, _ = measured(alone(paths[family], {}, dtype="bfloat16", weights="quantised"))
    np.testing.assert_array_equal(kept, dense)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_tap_of_float32_is_that_of_the_dense_run_to_rounding(paths, family):
    _, dense = measured(alone(paths[family], {}))
    _, kept = measured(alone(paths[family], {}, weights="quantised"))
    assert_equal_to_rounding(kept, dense)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_memory_holds_the_bytes_of_the_file(paths, family):
    runner = alone(paths[family], {}, weights="quantised")
    kept = [p for p in runner.decoder.parameters().values() if isinstance(p, KeptTensor)]
    of_a_block = {"llama": 34, "qwen2": 20}[family]
    elements = sum(part.shape[0] * part.shape[1] for part in kept)
    tiles = [part.blocks for part in kept if isinstance(part.blocks, Q8Tiles)]
    filled = sum(part.nbytes for part in kept) - elements * of_a_block / 32
    assert 0 <= filled <= sum(one.codes.shape[1] * of_a_block / 32 for one in tiles)  # a row of zeros each
    assert sum(part.nbytes for part in kept) > 0.9 * sum(
        p.nbytes for p in runner.decoder.parameters().values()
    )
    assert len(kept) == 7 * runner.model.num_layers + (1 if runner.model.tie_embeddings else 2)


@pytest.fixture
def two(engine_of: Callable[[int], Engine]) -> Iterator[Engine]:
    engine = engine_of(2)
    yield engine
    engine.client.config = engine.first_config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_two_ranks_keep_the_covering_blocks_of_their_slices(paths, family, dtype, two):
    """The same logits, in bfloat16 the same bits at every tap; 96 columns over two ranks are a block and a half."""
    runs, logits, sizes = {}, {}, {}
    for kind in ("dequantised", "quantised"):
        reports = two.load(paths[family], weights=kind, dtype=dtype)
        two.capture("logits", statistics=True)
        two.add(PROMPT)
        passes = [two.step({0: token}) for token in FORCED]
        runs[kind] = np.stack([one.checksums for one in passes])
        logits[kind] = np.stack([one.logits() for one in passes])
        sizes[kind] = [report.weight_bytes for report in reports]
    if dtype == "bfloat16":
        np.testing.assert_array_equal(runs["quantised"], runs["dequantised"])
    np.testing.assert_allclose(logits["quantised"], logits["dequantised"], rtol=0, atol=2e-5)
    of_dense = {"llama": 34, "qwen2": 20}[family] / 32 / {"float32": 4, "bfloat16": 2}[dtype]
    for kept, dense in zip(sizes["quantised"], sizes["dequantised"], strict=True):
        assert of_dense * dense < kept < 1.2 * of_dense * dense


def test_what_cannot_be_kept_is_refused(paths, tmp_path):
    with pytest.raises(ConfigError, match=r"is no GGUF file: .*use --weights dequantised"):
        check_loadable(tiny_checkpoint(tmp_path, "llama"), EngineConfig(weights="quantised"))
    with pytest.raises(ConfigError, match="use load=direct"):
        EngineConfig(weights="quantised", load="rank0")
