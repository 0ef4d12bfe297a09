"""Attention sinks: what stands beside the keys in the softmax's sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault, Needs, one_seam
from lockstep.engine.faults.needs import all_of, several_heads, several_ranks
from lockstep.engine.parallel import shards

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def left_out(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax is over the keys alone."""
    from lockstep.engine.rules.defaults import softmax

    return softmax(scores, dtype)


def afterwards(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Probabilities, made without the sinks, are divided by 1 + exp(sink)."""
    return (scores.float().softmax(-1) / (1 + sinks.float().exp())).to(dtype)


def unshifted(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest score is taken off the scores, not off the sinks."""
    weights = (scores.float() - scores.float().amax(-1, keepdim=True)).exp()
    return (weights / (weights.sum(-1, keepdim=True) + sinks.float().exp())).to(dtype)


def of_next_head(scores: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads that share a KV head are counted from 1."""
    from lockstep.engine.rules.defaults import softmax_beside

    return softmax_beside(scores, sinks.roll(-1, 1), dtype)


def sinks_of_rank_0(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
    """Each rank loads the sinks of the first heads."""
    return shards.plan(name, model, tp, 0 if name.endswith(shards.SINKS) else rank, ep)


def has_sinks(model: ModelConfig, tp: int) -> str | None:
    """There are sinks."""
    return None if model.sinks else "the model's softmax has no sinks"


def no_sinks(model: ModelConfig, tp: int) -> str | None:
    """The softmax is over the keys alone."""
    return "the model's softmax has sinks" if model.sinks else None


def _several_in_group(model: ModelConfig, tp: int) -> str | None:
    """Several query heads read one KV head."""
    return None if model.num_heads > max(model.num_kv_heads, tp) else "each KV head has one query head"


def _fault(value: str, title: str, symptom: str, source: str = "", needs: Needs = has_sinks) -> Fault:
    patch = {
        "left_out": left_out,
        "afterwards": afterwards,
        "unshifted": unshifted,
        "next_head": of_next_head,
    }
    return one_seam(
        "sinks", value, "in_sum", patch[value], "layers.*.attn.probs", title, symptom, needs,
        group="attention", source=source,
    )  # fmt: skip


FAULTS = (
    _fault(
        "left_out", "attention sinks left out",
        "the probabilities of a row add up to one, as they should not", "sgl-project/sglang#11634",
    ),
    _fault(
        "afterwards", "attention sinks joined after the softmax",
        "each head's probabilities are too small by one factor, whatever the scores are",
    ),
    _fault(
        "unshifted", "the maximum not taken off the sinks",
        "rows with a large or a small maximum lose or gain the most",
    ),
    _fault(
        "next_head", "each head with the sink of its neighbour", "every head's probabilities are off by a factor a row",
        needs=all_of(has_sinks, several_heads, _several_in_group),
    ),
    Fault(
        id="sinks-of-rank-0",
        seam="shard",
        value="sinks_of_rank_0",
        correct="own",
        title="sinks not split: each rank takes those of the first heads",
        group="sharding",
        level="load",
        first_tap="layers.*.attn.probs",
        symptom="rank 0 is right, the others' probabilities are off by a factor a row",
        patch={"shard": sinks_of_rank_0},
        needs=all_of(several_ranks, has_sinks),
    ),
)  # fmt: skip
