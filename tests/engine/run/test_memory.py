"""What cannot be loaded is refused from headers and arithmetic: no rank, no allocation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.engine.config import EngineConfig
from lockstep.engine.errors import CheckpointError, ConfigError, EngineError
from lockstep.engine.run.memory import cache_bytes, check_loadable, weight_bytes
from lockstep.engine.run.runner import Runner
from tests.checkpoints import EVERY_VARIANT, tiny_checkpoint
from tests.engine.harness import local_runner

pytestmark = pytest.mark.sampled_file(2)


def bytes_of(runner: Runner) -> tuple[int, int]:
    weights = sum(one.nbytes for one in runner.decoder.parameters().values())
    pool = runner.pool
    return weights, sum(one.nbytes for one in (*pool.keys.values(), *pool.values.values()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EVERY_VARIANT)
def test_the_bytes_needed_are_those_that_a_rank_allocates(name: str, variant: Callable[[str], Path]) -> None:
    runner = local_runner(variant(name), max_tokens=100, max_sequences=3)
    needed = (weight_bytes(runner.model, runner.config, 0), cache_bytes(runner.model, runner.config, 0))
    assert needed == bytes_of(runner)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_ranks_together_hold_every_weight_once_but_replicas(
    tp: int, variant: Callable[[str], Path]
) -> None:
    runner = local_runner(variant("llama-mha"))
    one, many = EngineConfig(), EngineConfig(tp=tp)
    together = sum(weight_bytes(runner.model, many, rank) for rank in range(tp))
    whole = weight_bytes(runner.model, one, 0)
    norms = sum(p.nbytes for name, p in runner.decoder.parameters().items() if "norm" in name)
    assert together == whole + (tp - 1) * norms
    assert sum(cache_bytes(runner.model, many, rank) for rank in range(tp)) == cache_bytes(
        runner.model, one, 0
    )


HOSTILE = [
    (
        {"num_hidden_layers": 2_000},
        r"missing: .*The configuration describes .*[GM]iB of weights, the files hold .* KiB",
    ),
    ({"hidden_size": 2_000_000_000}, r"misshapen: model.embed_tokens.weight is \[\d+, 64\].* 2000000000\]"),
    ({"vocab_size": 2**31 - 1}, r"misshapen: .*2147483647.*The configuration describes .* the files hold"),
    ({"intermediate_size": 2**31 - 2}, "misshapen"),
    ({"head_dim": 2**30}, "misshapen"),
    ({"num_attention_heads": 2**31 - 2, "num_key_value_heads": 2, "head_dim": 16}, "misshapen"),
]


@pytest.mark.sampled(3)
@pytest.mark.timeout(30)
@pytest.mark.parametrize(("sizes", "message"), HOSTILE, ids=lambda value: str(value)[:40])
def test_a_config_that_its_tensors_contradict_is_refused_by_their_headers(
    sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"layer_types": None} | sizes))
    with pytest.raises(CheckpointError, match=message):
        check_loadable(path, EngineConfig())
    with pytest.raises(EngineError):  # neither does a tensor parallelism that does not fit take its time
        check_loadable(path, EngineConfig(tp=5))


def test_a_model_that_memory_cannot_hold_is_refused_with_the_numbers(
    variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, config = variant("qwen2-tied"), EngineConfig()
    model = check_loadable(path, config)
    with pytest.raises(
        CheckpointError, match=r"needs .* TiB in float32: .* KiB of weights, .* TiB of KV cache"
    ):
        check_loadable(path, EngineConfig(num_blocks=2**40))
    needed = weight_bytes(model, config, 0) + cache_bytes(model, config, 0)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()._replace(free=0)
    monkeypatch.setattr(psutil, "swap_memory", lambda: swap)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=needed))
    check_loadable(path, config)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=needed - 1))
    with pytest.raises(CheckpointError, match="are free: use a smaller dtype"):
        check_loadable(path, config)
    with pytest.raises(CheckpointError, match="are free"):
        check_loadable(path, config, rank=0)
    check_loadable(path, EngineConfig(listen="localhost:29600"))  # its ranks are elsewhere


def test_a_rank_that_its_gpu_cannot_hold_is_refused_with_the_numbers(variant: Callable[[str], Path]) -> None:
    path, config = variant("llama"), EngineConfig(tp=2, device="cuda", max_tokens=100)
    model = check_loadable(path, config)  # a host does not know what is free there
    needed = weight_bytes(model, config, 1) + cache_bytes(model, config, 1)
    assert check_loadable(path, config, rank=1, free=needed) == model
    with pytest.raises(
        CheckpointError, match=r"rank 1 needs .* are free on its GPU: use .* or more GPUs \(--tp\)"
    ):
        check_loadable(path, config, rank=1, free=needed - 1)


def test_a_split_that_cannot_be_made_is_refused_first(variant: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="tp=3 does not divide"):
        check_loadable(variant("qwen2-tied"), EngineConfig(tp=3))
