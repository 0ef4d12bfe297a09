"""Sums and hand-overs among the ranks: groups, tails, missing members, stale inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.sharded import bounds


@bug(
    "embedding",
    accepted=("embedding", "sharding", "reduce"),
    words="reduc|sum|shard|zero|partial|row",
    taps=("embed",),
    step=1,
    model="llama",
    tp=2,
)
def rows_of_the_split_embedding_not_summed_in_decode(p: Patched) -> None:
    table = p.decoder.embed_tokens

    def forward(ids: Tensor) -> Any:
        local = ids - table.first
        mine = (local >= 0) & (local < len(table.weight))
        rows = nn.functional.embedding(local.where(mine, 0), table.weight) * mine[..., None]
        return rows if p.decode else p.ring.sum(p.rank, rows)

    table.forward = forward


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|sum|group|partial",
    taps=("mlp.down",),
    model="mistral-full",
    tp=4,
)
def sums_end_at_the_node_of_two_ranks(p: Patched) -> None:
    """The group of the collective is that of one host."""

    def reduce(partial: Tensor) -> Tensor:
        parts, first = p.ring.gather(p.rank, partial), p.rank // 2 * 2
        whole: Tensor = parts[first] + parts[first + 1]
        return whole

    for i, _ in p.layers():
        p.mlp(i).down_proj.reduce = reduce


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|sum|gather|partial",
    taps=("attn.o_proj",),
    layers=(1,),
    model="qwen3",
    tp=2,
)
def scattered_sum_never_gathered(p: Patched) -> None:
    """Each rank has the whole sum for its share of the tokens, and its own part for the others."""

    def reduce(partial: Tensor) -> Tensor:
        whole, mine = p.ring.sum(p.rank, partial), bounds(partial.shape[1], p.tp, p.rank)
        partial = partial.clone()
        partial[:, mine] = whole[:, mine]
        return partial

    p.attn(1).o_proj.reduce = reduce


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|sum|partial|left out|missing",
    taps=("attn.o_proj",),
    step=1,
    model="llama",
    tp=4,
)
def kernel_for_small_messages_sums_three_of_four(p: Patched) -> None:
    def reduce(partial: Tensor) -> Tensor:
        parts = p.ring.gather(p.rank, partial)
        whole: Tensor = sum(parts[: 3 if p.decode else 4])
        return whole

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce


@bug(
    "sharding",
    accepted=("reduce", "sharding"),
    words="reduc|sum|column|feature|dimension|last|tail|element|partial",
    taps=("mlp.down",),
    model="qwen2-tied",
    tp=2,
)
def tail_of_the_message_is_never_summed(p: Patched) -> None:
    """The last four of 64 features are the rank's own."""

    def reduce(partial: Tensor) -> Tensor:
        whole: Tensor = p.ring.sum(p.rank, partial).clone()
        whole[..., 60:] = partial[..., 60:]
        return whole

    for i, _ in p.layers():
        p.mlp(i).down_proj.reduce = reduce


@bug(
    "sharding",
    accepted=("input", "sharding"),
    words="input|stale|step|earlier|before|previous",
    taps=("mlp.gate", "mlp.up"),
    layers=(1,),
    ranks=(1,),
    step=1,
    model="llama",
    tp=2,
)
def mlp_of_rank_1_reads_its_input_of_the_step_before(p: Patched) -> None:
    held: dict[int, Tensor] = {}

    def around(forward: Any, x: Tensor) -> Any:
        stale, held[p.seq] = held.get(p.seq, x), x[:, -1:]
        return forward(stale)

    if p.rank == 1:
        p.wrap(p.mlp(1), around)
