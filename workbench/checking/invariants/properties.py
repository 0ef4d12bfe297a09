"""What must be true of a single run: of its numbers, of its ranks, of its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_frequencies import frequencies
from lockstep.engine.graph import operations_of
from lockstep.engine.graph.index_choice import as_seen
from lockstep.engine.ranks.reports import WeightsReport
from lockstep.engine.taps.names import STATISTICS, local_name
from lockstep.workbench.checking.invariants.invariant import Invariant
from lockstep.workbench.checking.invariants.runs import Run
from lockstep.workbench.diagnosis.operations.expected import as_read, heads_of
from lockstep.workbench.words.numbers import number
from lockstep.workbench.words.plain_text import plural

Property = Callable[[Run, ModelConfig, float], Invariant]


def finite(run: Run, model: ModelConfig, tolerance: float) -> Invariant:
    """No tap holds NaN or Inf (but for what the mask puts into scores)."""
    means = (
        "an overflow, a division by zero, or NaN of a mask: the first tap that holds any is where it begins"
    )
    nan, inf = STATISTICS.index("nan"), STATISTICS.index("inf")
    for i, one in enumerate(run.passes):
        for place, spec in enumerate(one.specs):
            masked = local_name(spec.name) == "attn.scores"
            odd = one.statistics[:, place, nan] + (0 if masked else one.statistics[:, place, inf])
            if odd.any():
                rank = int(odd.argmax())
                broken = f"{spec.name}, step {i}, rank {rank}: {odd[rank]:.0f} are NaN or Inf"
                return Invariant.of("all numbers finite", means, "", broken, spec.name)
    return Invariant.of("all numbers finite", means, f"every tap of {_passes(run)}")


def replicas(run: Run, model: ModelConfig, tolerance: float) -> Invariant:
    """What all ranks compute alike has the same bits on all."""
    name = "ranks hold the same bits"
    means = (
        "ranks compute apart what they should share: an all-reduce left out, different weights or inputs, or "
        "nondeterminism on one of them"
    )
    if len(run.passes[0].reports) == 1:
        return Invariant(name=name, result="not tried", summary="there is one rank")
    for i, one in enumerate(run.passes):
        for place, spec in enumerate(one.specs):
            if spec.layout.kind == "replicate" and len(set(one.checksums[:, place].tolist())) > 1:
                return Invariant.of(name, means, "", f"{spec.name}, step {i}: the ranks differ", spec.name)
    return Invariant.of(name, means, f"every replicated tap of {_passes(run)}")


def softmax(run: Run, model: ModelConfig, tolerance: float) -> Invariant:
    """Probabilities are none below zero, and each row sums to 1 (at most, where sinks take a share of it)."""
    name = "softmax rows sum to 1"
    means = (
        "softmax over the wrong axis or in low precision, a mask applied after it, or no mask's row at all"
    )
    worst = 0.0
    for i, one in enumerate(run.passes):
        for spec in one.specs:
            if local_name(spec.name) == "attn.probs":
                probs = np.asarray(one.tensor(spec.name, run.seq), dtype=np.float64)
                over = probs.sum(axis=-1) - 1
                off = float((np.maximum(over, 0) if model.sinks else np.abs(over)).max())
                if not off <= max(tolerance, 1e-3) or (probs < 0).any():
                    broken = f"{spec.name}, step {i}: a row sums to 1 ± {number(off)}"
                    return Invariant.of(name, means, "", broken, spec.name)
                worst = max(worst, off)
    return Invariant.of(name, means, f"every row of {_passes(run)}, to {number(worst)}")


def rotation(run: Run, model: ModelConfig, tolerance: float) -> Invariant:
    """RoPE turns pairs: each head keeps its norm (times the scaling's attention factor), and the first token, at
    position 0, is not turned at all."""
    name = "RoPE keeps norms, and position 0"
    means = (
        "RoPE: cosine and sine of different angles, wrong pairs, an attention factor left out; or positions that do "
        "not begin at 0"
    )
    for layer in range(model.num_layers):
        of_layer = model.of_layer(layer)
        for operation in (one for one in operations_of(of_layer) if one.kind == "rope"):
            own = as_seen(operation, of_layer)
            _, factor = frequencies(own, own.rope_theta, len(run.tokens), np.array)
            tap = f"layers.{layer}.{operation.tap}"
            given, y = (
                np.stack([row for _, row in sorted(run.rows(name).items())])
                for name in (f"layers.{layer}.{operation.inputs['x']}", tap)
            )
            x = heads_of(as_read(operation, given, own), own.head_dim)
            y = y.reshape(x.shape)
            channels = np.arange(x.shape[-1])
            turning = (
                channels >= len(channels) - own.rotary_dim if own.rotary_last else channels < own.rotary_dim
            )
            scale = np.where(turning, factor, 1.0)
            kept = np.linalg.norm(x * scale, axis=2)
            usual = np.maximum(kept, float(np.sqrt(np.mean(kept**2))) or 1.0)
            off = np.abs(np.linalg.norm(y, axis=2) - kept) / usual
            if (wrong := np.argwhere(~(off <= tolerance))).size:
                index, head = map(int, wrong[0])
                broken = (
                    f"{tap}, token {index}, head {head}: the norm is off by {number(float(off[index, head]))}"
                )
                return Invariant.of(name, means, "", broken, tap)
            moved = np.linalg.norm(y[0] - scale * x[0], axis=1) / usual[0]
            if not moved.max() <= tolerance:
                return Invariant.of(name, means, "", f"{tap}: the first token is turned", tap)
    return Invariant.of(name, means, f"q and k of {plural(model.num_layers, 'layer')}, {_passes(run)}")


def cached(run: Run, model: ModelConfig, tolerance: float) -> Invariant:
    """Each layer's cache reaches as far as the tokens that were run."""
    name = "cache as long as the sequence"
    means = "positions or slots: a row written elsewhere, twice, or not at all"
    read = 0
    for i, one in enumerate(run.passes):
        read += len(one.sequences[run.seq].ids)
        for rank, report in enumerate(one.reports):
            reported = next(s for s in report.sequences if s.seq == run.seq)
            if set(reported.held) | {reported.kv_len} != {read}:
                lengths = sorted({*reported.held, reported.kv_len})
                broken = f"step {i}, rank {rank}: {lengths} rows are cached of {plural(read, 'token')}"
                return Invariant.of(name, means, "", broken)
    return Invariant.of(name, means, f"every layer and rank of {_passes(run)}")


#: Those of one run, in the order in which they are reported.
PROPERTIES: Sequence[Property] = (finite, replicas, softmax, rotation, cached)


def loaded(before: Sequence[WeightsReport], after: Sequence[WeightsReport]) -> list[Invariant]:
    """The ranks' weights are the checkpoint's, bit for bit, and still so at the end."""
    name = "weights as in the checkpoint"
    means = "loading: a shard cut wrongly, a tensor under another's name or not loaded, a changed dtype"
    shares = [(rank, name, held) for rank, one in enumerate(before) for name, held in one.weights.items()]
    other = [(rank, name, held) for rank, name, held in shares if held.comparison == "different"]
    absent = sum(held.comparison == "absent" for _, _, held in shares)
    broken = "" if not other else f"{other[0][1]} on rank {other[0][0]} and {len(other) - 1} more differ"
    rest = f"; {absent} have no counterpart to compare" if absent else ""
    found = [Invariant.of(name, means, f"{plural(len(shares), 'share')}{rest}", broken)]
    moved = [
        f"{name} on rank {rank}"
        for rank, (one, two) in enumerate(zip(before, after, strict=True))
        for name, held in one.weights.items()
        if two.weights[name].checksum != held.checksum
    ]
    means = "an operation writes over the weights: an in-place kernel, a buffer that is shared"
    name = "weights left as they were"
    reported = "the same bits after all runs"
    return [
        *found,
        Invariant.of(name, means, reported, f"{moved[0]} has changed while it ran" if moved else ""),
    ]


def _passes(run: Run) -> str:
    return plural(len(run.passes), "step")
