"""Tensor parallelism: how q/k/v are split over the ranks, and how row-parallel results are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, own_kv, qkv_biases, qkv_widths, row_biases, several_ranks
from lockstep.engine.parallel import shards

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.parallel.comm import Comm


def qkv_by_in_features(model: ModelConfig, tp: int, rank: int) -> shards.QKVPlan:
    """A rank computes all heads of q, k and v, but from its own slice of the in features; the partial
    products are never summed, and it goes on with its own heads of them. The bias is rank 0's, so that
    the ranks' sum is right."""
    right = shards.qkv_by_heads(model, tp, rank)
    q = shards.Span(0, model.num_heads * model.head_dim)
    kv = shards.Span(0, model.num_kv_heads * model.head_dim)
    columns = shards.even(model.hidden_size, tp, rank, "the hidden size")
    return shards.QKVPlan((q, kv, kv), columns, right.rows, bias=rank == 0)


def qkv_shards_by_in_features(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
    """q/k/v weights are cut along dimension 1, their biases not at all."""
    right = shards.plan(name, model, tp, rank, ep)
    if not name.endswith(tuple(f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias"))):
        return right
    if name.endswith("bias"):
        return shards.Shard(right.shape, None, shards.Span(0, right.shape[0]), tp)
    return shards.Shard(right.shape, 1, shards.even(model.hidden_size, tp, rank))


def mixed_qkv_sizes(
    packed: Tensor, sizes: tuple[int, ...], model: ModelConfig, tp: int
) -> tuple[Tensor, ...]:
    """Offsets of k and v are counted in *global* heads, in a pack of local size (wrapping around)."""
    import torch

    width = packed.shape[-1]
    return tuple(
        packed[:, (torch.arange(size, device=packed.device) + start) % width]
        for start, size in zip(_global_starts(model), sizes, strict=True)
    )


def _global_starts(model: ModelConfig) -> tuple[int, int, int]:
    """Where q, k and v begin in a pack of all heads."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return 0, q, q + kv


def no_reduce(partial: Tensor, comm: Comm) -> Tensor:
    """Each rank keeps its own partial."""
    return partial


def reduce_twice(partial: Tensor, comm: Comm) -> Tensor:
    """The sum is summed over the ranks again."""
    return comm.all_reduce(comm.all_reduce(partial))


def row_bias_on_every_rank(total: Tensor, bias: Tensor, comm: Comm) -> Tensor:
    """The bias was in every rank's partial: it counts tp times."""
    return total + comm.size * bias


def _other_starts(model: ModelConfig, tp: int) -> str | None:
    """Offsets wrap around in the pack: with some head counts they come out right."""
    q, kv = qkv_widths(model, tp)
    same = all(
        start % (q + 2 * kv) == own for start, own in zip(_global_starts(model), (0, q, q + kv), strict=True)
    )
    return several_ranks(model, tp) or ("with these head counts the offsets come out right" if same else None)


def reduce_mean(partial: Tensor, comm: Comm) -> Tensor:
    """The partials are averaged."""
    return comm.all_reduce(partial) / comm.size


def reduce_without_last(partial: Tensor, comm: Comm) -> Tensor:
    """The last rank's partial is lost."""
    lost = 0 < comm.rank == comm.size - 1
    return comm.all_reduce(partial.new_zeros(partial.shape) if lost else partial)


def no_row_bias(total: Tensor, bias: Tensor, comm: Comm) -> Tensor:
    """The bias of a row-parallel layer is nobody's."""
    return total


_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def _of_rank_0(name: str, model: ModelConfig, tp: int, rank: int, ep: int) -> shards.Shard:
    own, first = (shards.plan(name, model, tp, at, ep) for at in (rank, 0))
    return first if first.local_shape == own.local_shape else own


def columns_of_rank_0(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
    """Every rank loads rank 0's part of the column-parallel matrices."""
    column = name.rpartition(".")[0].endswith(_COLUMN)
    return _of_rank_0(name, model, tp, rank, ep) if column else shards.plan(name, model, tp, rank, ep)


def biases_of_rank_0(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
    """The biases are not split: each rank reads the first elements."""
    column = name.endswith(tuple(f"{part}.bias" for part in _COLUMN))
    return _of_rank_0(name, model, tp, rank, ep) if column else shards.plan(name, model, tp, rank, ep)


FAULTS = (
    Fault(
        id="qkv-sharded-on-in-features",
        seam="qkv_shard_dim",
        value="1",
        correct="0",
        title="q/k/v sharded along in_features",
        group="sharding",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="each rank holds a partial product of all heads; the ranks' sum is right, none of them is",
        patch={"qkv_shard_dim": qkv_by_in_features, "shard": qkv_shards_by_in_features},
        needs=all_of(own_kv, several_ranks),
    ),
    Fault(
        id="qkv-sizes-mixed",
        seam="qkv_sizes",
        value="mixed",
        correct="local",
        title="q|k|v offsets from global head counts",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.k_proj",
        symptom="every column is a right column in a wrong slot",
        patch={"qkv_sizes": mixed_qkv_sizes},
        needs=all_of(own_kv, _other_starts),
    ),
    Fault(
        id="reduce-missing",
        seam="reduce",
        value="missing",
        correct="sum",
        title="row-parallel results never summed",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.o_proj",
        symptom="every rank goes on with its own partial; their sum would be right",
        source="intel/ipex-llm#10558",
        patch={"reduce": no_reduce},
        needs=several_ranks,
    ),
    Fault(
        id="reduce-twice",
        seam="reduce",
        value="twice",
        correct="sum",
        title="all-reduce done twice",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.o_proj",
        symptom="the sum is tp times too large",
        source="lightseekorg/tokenspeed#80",
        patch={"reduce": reduce_twice},
        needs=several_ranks,
    ),
    Fault(
        id="row-bias-per-rank",
        seam="row_bias",
        value="every_rank",
        correct="once",
        title="row-parallel bias added on every rank",
        group="bias",
        level="step",
        first_tap="layers.*.attn.o_proj",
        symptom="the bias is counted tp times",
        source="Wenyueh/MinivLLM#80",
        patch={"row_bias": row_bias_on_every_rank},
        needs=all_of(several_ranks, row_biases),
    ),
    Fault(
        id="reduce-mean",
        seam="reduce",
        value="mean",
        correct="sum",
        title="row-parallel results averaged",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.o_proj",
        symptom="the sum is tp times too small",
        patch={"reduce": reduce_mean},
        needs=several_ranks,
    ),
    Fault(
        id="reduce-without-last",
        seam="reduce",
        value="without_last",
        correct="sum",
        title="the last rank's partial lost",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.o_proj*",
        symptom="the sum lacks one rank's partial, on all ranks alike",
        patch={"reduce": reduce_without_last},
        needs=several_ranks,
    ),
    Fault(
        id="row-bias-missing",
        seam="row_bias",
        value="missing",
        correct="once",
        title="row-parallel bias added by no rank",
        group="bias",
        level="step",
        first_tap="layers.*.attn.o_proj",
        symptom="every token is off by the same vector, minus the bias",
        patch={"row_bias": no_row_bias},
        needs=row_biases,
    ),
    Fault(
        id="shard-of-rank-0",
        seam="shard",
        value="rank_0",
        correct="own",
        title="every rank loads rank 0's shard",
        group="sharding",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="rank 0 is right, the others hold its heads and columns",
        source="vllm-project/vllm-gguf-plugin#103",
        patch={"shard": columns_of_rank_0},
        needs=several_ranks,
    ),
    Fault(
        id="bias-of-rank-0",
        seam="shard",
        value="biases_of_rank_0",
        correct="own",
        title="biases not split: each rank takes the first part",
        group="sharding",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="rank 0 is right; the others are off by the same vector for every token",
        source="NVIDIA-NeMo/Automodel#1410",
        patch={"shard": biases_of_rank_0},
        needs=all_of(several_ranks, qkv_biases),
    ),
)
