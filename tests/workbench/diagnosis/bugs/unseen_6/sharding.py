"""What each rank loads, and what the ranks sum and gather."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.sharded import bounds


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard|k_proj|other|keys|holds|filled|weight",
    taps=("attn.v_proj",),
    layers=(1,),
    ranks=(1,),
    model="qwen2-kv8",
    tp=2,
)
def rank_1_loads_its_keys_into_the_values_too(p: Patched) -> None:
    if p.rank == 1:
        p.weight(p.attn(1).v_proj, lambda w: p.attn(1).k_proj.weight.clone())


@bug(
    "sharding",
    accepted=("weight", "sharding", "activation"),
    words="swap|exchang|up|gate|rank",
    taps=("mlp.gate", "mlp.up"),
    ranks=(3,),
    model="mistral-full",
    tp=4,
)
def rank_3_packs_up_before_gate(p: Patched) -> None:
    if p.rank == 3:
        for i, _ in p.layers():
            mlp = p.mlp(i)
            mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


@bug(
    "sharding",
    accepted=("sharding", "weight", "heads", "bias"),
    words="rank|shard|head|row|offset|shift|early",
    taps=("attn.k_proj", "attn.v_proj"),
    ranks=(2,),
    model="qwen2-kv8",
    tp=4,
)
def rank_2_begins_one_kv_head_early(p: Patched) -> None:
    if p.rank == 2:
        for i, _ in p.layers():
            whole, size = p.full.model.layers[i].self_attn, p.attn(i).head_dim
            rows = slice(3 * size, 5 * size)
            for name in ("k_proj", "v_proj"):
                source = getattr(whole, name)
                p.weight(getattr(p.attn(i), name), lambda w, source=source, rows=rows: source.weight[rows])
                p.bias(getattr(p.attn(i), name), lambda b, source=source, rows=rows: source.bias[rows])


@bug(
    "sharding",
    accepted=("sharding", "weight"),
    words="rank|shard",
    taps=QKV,
    ranks=(2, 3),
    model="llama-mha",
    dtype="bfloat16",
    tp=4,
)
def ranks_2_and_3_load_the_shards_of_ranks_0_and_1(p: Patched) -> None:
    """The shard's number is the rank within a node of two."""
    for i, _ in p.layers():
        attn, mlp = p.attn(i), p.mlp(i)
        whole, units = p.full.model.layers[i].self_attn, p.full.model.layers[i].mlp
        for side, source in (
            (attn.q_proj, whole.q_proj),
            (attn.k_proj, whole.k_proj),
            (attn.v_proj, whole.v_proj),
            (mlp.gate_proj, units.gate_proj),
            (mlp.up_proj, units.up_proj),
        ):
            mine = bounds(len(source.weight), p.tp, p.rank % 2)
            p.weight(side, lambda w, source=source, mine=mine: source.weight[mine].clone())
        for side, source in ((attn.o_proj, whole.o_proj), (mlp.down_proj, units.down_proj)):
            mine = bounds(source.weight.shape[1], p.tp, p.rank % 2)
            p.weight(side, lambda w, source=source, mine=mine: source.weight[:, mine].clone())


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|own partial",
    taps=("attn.o_proj",),
    model="qwen3",
    dtype="bfloat16",
    tp=4,
)
def messages_over_the_size_of_the_buffer_never_summed(p: Patched) -> None:
    """It holds eight tokens, and the way for longer ones was not taken."""
    for i, _ in p.layers():
        for side in (p.attn(i).o_proj, p.mlp(i).down_proj):
            known = side.reduce

            def reduce(partial, known=known):
                return known(partial) if partial.shape[1] <= 8 else partial

            side.reduce = reduce


@bug(
    "collectives",
    accepted=("reduce", "sharding"),
    words="reduce|sum|partial|rank",
    taps=("mlp.down",),
    step=1,
    model="llama",
    tp=4,
)
def rank_2_sends_its_part_of_attention_for_that_of_the_mlp(p: Patched) -> None:
    """The decode graph's buffer still holds what the sum before was made of."""
    for i, _ in p.layers():
        attn, down, held = p.attn(i).o_proj, p.mlp(i).down_proj, {}

        def first(partial, known=attn.reduce, held=held):
            held["partial"] = partial
            return known(partial)

        def second(partial, known=down.reduce, held=held):
            return known(held["partial"] if p.decode and p.rank == 2 else partial)

        attn.reduce, down.reduce = first, second


@bug(
    "collectives",
    accepted=("head", "reduce", "sharding"),
    words="rank|step|before|stale|shard|vocab|previous|old",
    taps=("logits",),
    ranks=(1,),
    step=1,
    model="qwen3-bias",
    tp=2,
)
def rank_1_gathers_its_logits_of_the_step_before(p: Patched) -> None:
    held = {}

    def change(logits):
        known, held[p.seq] = held.get(p.seq), logits[:, -1:]
        return known if p.decode else logits

    if p.rank == 1:
        p.output(p.model.lm_head, change)
