"""The memory that a run will take, from shapes alone (torch-free): what would not fit is refused before it starts.

Weights and cache are exact (`memory`), captured tensors too. What a pass holds besides is measured: the factors below
are fitted to peaks of rank processes, which the tests hold to within 30 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.engine.checkpoint.source import DTYPE_BITS
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.graph.operation import OF_POSITIONS
from lockstep.engine.machine import LESS_MEMORY, free_memory
from lockstep.engine.parallel.sizes import size_of
from lockstep.engine.run.memory import cache_bytes, state_bytes, weight_bytes
from lockstep.engine.taps.names import local_name, model_taps, newest_rows, operation_at
from lockstep.engine.text import bytes_text

#: A process that has imported torch, before it holds anything.
TORCH_BYTES = 256 << 20
#: Statistics of any tap beside the pass: they are made by tiles.
STATISTICS_BYTES = 64 << 20
#: A chunk of a prompt that is proposed at least: smaller ones read the weights for little.
_LEAST_CHUNK = 64

_BY_KEY = ("attn.scores", "attn.probs")


@dataclass(frozen=True, slots=True)
class PassSize:
    """What a pass reads of one sequence: `new` tokens, which attend to `keys`, themselves included."""

    new: int
    keys: int


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a pass leaves behind: taps whole and of the last token (indices), attention to `rows_bytes` of float16, and
    attention by `newest_rows`."""

    full: Sequence[int] = ()
    last: Sequence[int] = ()
    rows_bytes: int | None = None
    statistics: bool = False
    newest: Sequence[int] = ()


def largest_passes(lengths: Sequence[int], chunk: int | None) -> list[PassSize]:
    """The largest pass over prompts of so many tokens: the last chunk of each (None: all of it) attends to the most."""
    return [PassSize(min(chunk or length, length), length) for length in lengths]


def tap_elements(model: ModelConfig, tap: str, size: PassSize) -> int:
    """Elements of the tensor at a tap, of one sequence, as one rank alone would have it (`engine.taps.names`)."""
    operation = operation_at(tap)
    if operation is None or operation.kind == "head":  # a row for each sequence
        return model.vocab_size
    if operation.form == "cells":
        return (model.num_heads if operation.sharded else 1) * size.new * size.keys
    if operation.form == "state":
        depth = model.mamba.state if model.mamba is not None else 0
        depth = model.linear.key_dim if model.linear is not None else depth
        return depth * size_of(operation.width, model)
    slots = model.experts.top_k if operation.form == "slots" and model.experts is not None else 1
    rows = size.keys if operation.form in OF_POSITIONS else size.new
    return rows * slots * size_of(operation.width, model)


def captured_bytes(
    model: ModelConfig, config: EngineConfig, wanted: LeftBehind, sizes: Sequence[PassSize]
) -> int:
    """Bytes of the tensors that all ranks together hand over after a pass."""
    specs, total = model_taps(model, config.tp, config.ep), 0
    item = DTYPE_BITS[config.dtype] // 8
    attention = 0
    for place, spec in enumerate(specs):
        # A shard lies on one rank, or on the replicas of a KV head; all else on every rank.
        sharded = spec.layout.kind == "shard"
        copies = spec.layout.replicas * spec.layout.groups if sharded else config.tp
        if place in wanted.full:
            total += copies * item * sum(tap_elements(model, spec.name, size) for size in sizes)
        elif place in wanted.newest:
            rows = sum(newest_rows(model.num_heads, size.new, size.keys) * size.keys for size in sizes)
            total += copies * item * model.num_heads * rows
        elif place in wanted.last:
            last = [PassSize(1, size.keys) for size in sizes]
            one = copies * item * sum(tap_elements(model, spec.name, row) for row in last)
            total += one
            if local_name(spec.name) in _BY_KEY:
                whole = item * sum(tap_elements(model, spec.name, size) for size in sizes)
                attention += whole - one
    return total + min(attention, (wanted.rows_bytes or 0) * item // 2)


def working_bytes(model: ModelConfig, config: EngineConfig, sizes: Sequence[PassSize]) -> int:
    """Bytes that one rank holds at the height of a pass, beside weights and cache: a layer's activations."""
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // config.tp
    if model.latent is not None:  # keys and values of all positions are made in each pass
        made = model.num_heads * (model.latent.expanded_dim + model.head_dim + model.value_dim) // config.tp
        attention += made * sum(size.keys for size in sizes) // max(1, sum(size.new for size in sizes))
    row = 8 * model.hidden_size + 3 * model.intermediate_size // config.tp + 2 * attention
    if (
        experts := model.experts
    ) is not None:  # what goes in and comes out lies beside itself in the experts' order
        features = 2 * model.hidden_size + 3 * experts.width * config.ep // config.tp
        row += experts.top_k * features + 3 * experts.shared_width // config.tp
    logits = 2 * len(sizes) * model.vocab_size
    return (sum(size.new for size in sizes) * row + logits) * DTYPE_BITS[config.dtype] // 8


def attention_bytes(model: ModelConfig, config: EngineConfig, sizes: Sequence[PassSize]) -> int:
    """Bytes that one rank holds besides where a layer's scores or probabilities are wanted whole: products, scores and
    probabilities, of one sequence at a time."""
    most = max((size.new * size.keys for size in sizes), default=0)
    return 3 * model.num_heads // config.tp * most * DTYPE_BITS[config.dtype] // 8


def loaded_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """What the ranks of one machine take before any pass: torch, weights, cache."""
    ranks = range(config.tp)
    parts = (weight_bytes, cache_bytes, state_bytes)
    held = sum(part(model, config, rank) for part in parts for rank in ranks)
    return held + config.tp * TORCH_BYTES


def run_bytes(
    model: ModelConfig, config: EngineConfig, wanted: LeftBehind, sizes: Sequence[PassSize]
) -> dict[str, int]:
    """What the ranks of one machine and their host take for a pass beside weights and cache, by what takes it. What is
    captured lies on the rank and, when it has come over, on the host."""
    names = [local_name(spec.name) for spec in model_taps(model, config.tp, config.ep)]
    parts = {"activations": config.tp * working_bytes(model, config, sizes)}
    if any(names[place] in _BY_KEY for place in wanted.full):
        parts["attention held whole"] = config.tp * attention_bytes(model, config, sizes)
    if captured := captured_bytes(model, config, wanted, sizes):
        parts["captured tensors"] = 2 * captured
    if wanted.statistics:
        parts["statistics"] = config.tp * STATISTICS_BYTES
    return parts


def check_room(
    model: ModelConfig,
    config: EngineConfig,
    lengths: Sequence[int],
    wanted: LeftBehind,
    *,
    loaded: bool = False,
) -> None:
    """RequestError where prompts of so many tokens would take more memory than is free. `loaded`: ranks have their
    weights and cache already, or these were looked at elsewhere."""
    if config.device.startswith("cuda") or config.listen:  # the ranks' memory is not this machine's
        return
    there = {} if loaded else {"weights and cache": loaded_bytes(model, config)}

    def parts(chunk: int | None) -> Mapping[str, int]:
        return there | run_bytes(model, config, wanted, largest_passes(lengths, chunk))

    tokens = " + ".join(map(str, lengths))
    refuse_beyond(f"a pass over {tokens} tokens in {config.dtype}", parts, lengths, config.chunk_tokens)


def refuse_beyond(
    what: str, parts: Callable[[int | None], Mapping[str, int]], lengths: Sequence[int], chunk: int | None
) -> None:
    """RequestError where `parts(chunk)`, bytes by what takes them, are more than is free; it names the chunk that
    would fit, where one would."""
    free, needed = free_memory(), parts(chunk)
    if sum(needed.values()) <= free:
        return
    reported = ", ".join(f"{bytes_text(size)} of {name}" for name, size in needed.items() if size)
    smaller = min(chunk or max(lengths), max(lengths)) // 2
    while smaller >= _LEAST_CHUNK and sum(parts(smaller).values()) > free:
        smaller //= 2
    advice = f"--chunk {smaller} would fit" if smaller >= _LEAST_CHUNK else f"use {LESS_MEMORY}"
    raise RequestError(
        f"{what} takes about {bytes_text(sum(needed.values()))} ({reported}); {bytes_text(free)} are free: {advice}"
    )


def kept_run_bytes(
    model: ModelConfig, config: EngineConfig, wanted: LeftBehind, lengths: Sequence[int], steps: int
) -> int:
    """Bytes of what all passes together leave behind: the prompts, then `steps` tokens of each."""
    step = config.chunk_tokens or max(lengths)
    starts = range(0, max(lengths), step)
    prefill = [[PassSize(min(step, n - at), min(n, at + step)) for n in lengths if n > at] for at in starts]
    decode = [[PassSize(1, n + 1 + k) for n in lengths] for k in range(steps)]
    return sum(captured_bytes(model, config, wanted, sizes) for sizes in (*prefill, *decode))
