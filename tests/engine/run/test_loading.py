"""Loading into running ranks: again and again, by either way, and what goes wrong leaves the engine usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.errors import CheckpointError, ConfigError, RequestError
from lockstep.engine.ranks.messages import ReadWeights
from tests.checkpoints import tiny_checkpoint
from tests.engine.harness import Engine

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4]


def checksums(engine: Engine) -> np.ndarray:
    engine.capture(statistics=True)
    return np.stack([one.checksums for one in engine.generate([PROMPT], 3)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_rank_0_hands_out_is_what_each_would_have_read(
    dtype: str, engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(2)
    own = engine.load(variant("qwen2-untied"), dtype=dtype)
    expected = engine.client.call(ReadWeights())
    run = checksums(engine)
    handed = engine.load(variant("qwen2-untied"), dtype=dtype, load="rank0")
    assert engine.client.call(ReadWeights()) == expected
    assert (checksums(engine) == run).all()
    assert handed[1].bytes_read == 0 < own[1].bytes_read
    assert handed[0].bytes_read >= own[0].bytes_read + own[1].bytes_read - 2 * 3 * 64 * 4 * 4


def test_one_model_after_another(engine_of: Callable[[int], Engine], variant: Callable[[str], Path]) -> None:
    engine = engine_of(2)
    first = {}
    for name in ("qwen2-tied", "llama-bias", "qwen3"):
        engine.load(variant(name))
        first[name] = checksums(engine)
    for name in ("llama-bias", "qwen2-tied"):
        engine.load(variant(name))
        assert (checksums(engine) == first[name]).all()


@pytest.mark.parametrize("load", ["direct", "rank0"])
def test_a_checkpoint_that_cannot_be_loaded_leaves_the_ranks_usable(
    load: str, engine_of: Callable[[int], Engine], variant: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = engine_of(2)
    path = tiny_checkpoint(tmp_path, "qwen2", attention_bias=True)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 90'))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[96, 64\].*expects \[90, 64\]"):
        engine.load(path, load=load)  # refused by the host
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[96, 64\].*expects \[90, 64\]"):
        engine.client.load(path)  # refused by the ranks
    with pytest.raises(RequestError, match="no model is loaded"):
        engine.step()
    (path / "config.json").write_text(config.replace('"qwen2"', '"gpt9"'))
    with pytest.raises(ConfigError, match="gpt9"):
        engine.client.load(path)
    engine.load(variant("qwen2-tied"))
    assert len(engine.generate([PROMPT], 2)) == 2


def test_a_tensor_parallelism_that_does_not_fit_is_refused_by_the_ranks_too(
    engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path, "llama", hidden_size=72, num_attention_heads=9, num_key_value_heads=9)
    with pytest.raises(ConfigError, match="tp=2 does not divide 9 attention heads: use 1, 3 or 9"):
        engine_of(2).client.load(path)


def test_a_reload_under_other_rules_and_back_restores_every_bit(
    engine_of: Callable[[int], Engine], variant: Callable[[str], Path]
) -> None:
    engine = engine_of(2)
    engine.load(variant("qwen2-tied"))
    right, weights = checksums(engine), engine.client.call(ReadWeights())
    for rules in ({"load_bias": "false"}, {"qkv_shard_dim": "1"}, {"lm_head": "missing"}):
        engine.rules(rules, reload=True)
        assert (checksums(engine) != right).any()
        assert engine.client.call(ReadWeights()) != weights
        engine.rules({}, reload=True)
        assert engine.client.call(ReadWeights()) == weights
        assert (checksums(engine) == right).all()


def test_the_old_weights_are_gone_before_the_new_ones_come(
    engine_of: Callable[[int], Engine], tmp_path: Path
) -> None:
    """A rank has no room for both: loading again, or under other rules, adds nothing to its peak memory."""
    path = tiny_checkpoint(tmp_path, "llama", vocab_size=40_000, hidden_size=256, num_hidden_layers=1)
    weights = 2 * 40_000 * 256 * 4  # embedding and head
    engine = Engine(1)
    try:
        first = engine.load(path)[0].peak_bytes
        engine.rules({"rope": "twice"}, reload=True)
        engine.rules({}, reload=True)
        assert engine.load(path)[0].peak_bytes - first < weights // 4
    finally:
        engine.close()
