"""Whether a checkpoint can be loaded at all: decided from headers and arithmetic before anything is allocated.

Torch-free: the host asks before it starts a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from lockstep.engine.checkpoint.gguf.source import GgufSource
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.source import DTYPE_BITS, Source
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.engine.kv.sizing import KEPT_STATE_BYTES, context_length, pool_blocks
from lockstep.engine.machine import free_memory
from lockstep.engine.parallel import shards
from lockstep.engine.text import bytes_text

#: Bytes of an element of the widest dtype that ranks report in.
_WIDEST = 8
#: Bytes of a report that are no tensor: statistics of all taps and weights, candidates, a traceback.
_BESIDE_TENSORS = 64 << 20


def check_loadable(
    path: Path, config: EngineConfig, rank: int | None = None, free: int | None = None
) -> ModelConfig:
    """The model of a checkpoint that can be split as `config` states, whose headers fit its config.json, and for
    which there is memory: for the share of `rank`, or (None) of all ranks that are started on this machine. `free`:
    bytes of the GPU that the rank may take; a host does not know them. ConfigError or CheckpointError otherwise."""
    model, source = open_checkpoint(path)
    with source:
        check_fit(model, config)
        verify(source, model)
    if config.weights == "quantised" and not isinstance(source, GgufSource):
        raise ConfigError(
            f"{path} is no GGUF file: there is nothing quantised to keep; use --weights dequantised"
        )
    if free is None and config.device.startswith("cuda"):
        return model
    started_here = range(0 if config.listen else config.tp)
    ranks = started_here if rank is None else [rank]
    _check_memory(model, config, source, ranks, free_memory() if free is None else free)
    return model


def _check_memory(
    model: ModelConfig, config: EngineConfig, source: Source, ranks: Sequence[int], free: int
) -> None:
    """CheckpointError where `ranks` need more memory than is free."""
    if config.weights == "quantised":
        weights = sum(kept_bytes(model, config, rank, source) for rank in ranks)
    else:
        weights = sum(weight_bytes(model, config, rank) for rank in ranks)
    cache = sum(cache_bytes(model, config, rank) + state_bytes(model, config, rank) for rank in ranks)
    if weights + cache > free:
        on_gpu = config.device.startswith("cuda")
        who, where = (f"rank {ranks[0]}", " on its GPU") if on_gpu else ("the model", "")
        raise CheckpointError(
            f"{who} needs {bytes_text(weights + cache)} in {config.dtype}: {bytes_text(weights)} of weights, "
            f"{bytes_text(cache)} of KV cache; {bytes_text(free)} are free{where}: use a smaller dtype, a shorter "
            f"context, or {'more GPUs (--tp)' if on_gpu else 'a machine with more memory'}"
        )


def weight_bytes(model: ModelConfig, config: EngineConfig, rank: int) -> int:
    """Bytes of a rank's share of the weights."""
    bits = 0
    for name in shards.parameters(model):
        held = shards.plan(name, model, config.tp, rank, config.ep).local_shape
        bits += prod(held) * DTYPE_BITS[shards.held_in(name, model, config.dtype)]
    return bits // 8


def kept_bytes(model: ModelConfig, config: EngineConfig, rank: int, source: Source) -> int:
    """About the bytes of a rank's share of the weights where they are kept as they lie in the file."""
    total = 0
    for name, shape in shards.parameters(model).items():
        local = shards.plan(name, model, config.tp, rank, config.ep).local_shape
        total += source.info(name).nbytes * prod(local) // prod(shape)
    return total


def cache_bytes(model: ModelConfig, config: EngineConfig, rank: int) -> int:
    """Bytes of a rank's pool of keys and values."""
    rows = pool_blocks(model, config) * config.block_size
    cached = (shards.cached(model.of_layer(i), config.tp, rank) for i in shards.cached_layers(model))
    row = sum(heads * sum(widths) for heads, widths in cached)
    return row * rows * DTYPE_BITS[config.dtype] // 8


def state_bytes(model: ModelConfig, config: EngineConfig, rank: int) -> int:
    """Bytes at most of a rank's states: those that are met next, and those kept of before."""
    if model.short_conv is not None:
        channels = shards.span_of("conv_channels", model, config.tp, rank).size
        return _states(model, config, (model.conv - 1) * channels * DTYPE_BITS[config.dtype] // 8)
    if (mamba := model.mamba) is not None:
        width = {
            width: shards.span_of(width, model, config.tp, rank).size
            for width in ("ssm_channels", "ssm_groups")
        }
        newest = (mamba.conv - 1) * (width["ssm_channels"] + 2 * width["ssm_groups"])
        one = 4 * width["ssm_channels"] * mamba.state + newest * DTYPE_BITS[config.dtype] // 8
        return _states(model, config, one)
    if (linear := model.linear) is None:
        return 0
    sizes = {
        width: shards.span_of(width, model, config.tp, rank).size
        for width in ("linear_keys", "linear_values")
    }
    rows = (linear.conv - 1) * (2 * sizes["linear_keys"] + sizes["linear_values"])
    one = 4 * sizes["linear_values"] * linear.key_dim + rows * DTYPE_BITS[config.dtype] // 8
    return _states(model, config, one)


def _states(model: ModelConfig, config: EngineConfig, one: int) -> int:
    """Of all sequences' states and of those kept of before; `one` layer's of one sequence has so many bytes."""
    newest = config.max_sequences * one * sum(model.stateful)
    return newest + min(KEPT_STATE_BYTES, newest * context_length(model, config))


def report_bytes(model: ModelConfig) -> int:
    """Bytes that a rank's report may have: the largest tensor of the model, in the widest dtype, and what is reported
    beside it."""
    context = model.context
    width = max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim)
    if model.latent is not None:
        width = max(width, model.num_heads * model.latent.expanded_dim)
    if model.experts is not None:  # rows of each token at all of its experts
        width = max(width, model.experts.top_k * max(model.hidden_size, model.experts.width))
    if model.mamba is not None:
        width = max(width, model.mamba.channels)
    of_a_tap = context * max(width, 2 * model.num_kv_heads * model.head_dim, model.num_heads * context)
    of_a_weight = width * max(model.hidden_size, model.vocab_size)
    return _BESIDE_TENSORS + _WIDEST * max(of_a_tap, of_a_weight)
