"""What a rank holds of an operation: which of the checkpoint's tensors, and which rows and columns of them."""

from __future__ import annotations

from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel import shards
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.layouts import shard_groups
from lockstep.workbench.diagnosis.dataflow import MODULES
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site, near

#: Tap kind -> the checkpoint's norm.
NORMS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


#: Of row-parallel products, what they multiply.
BEFORE = {"attn.o_proj": "attn.context", "mlp.down": "mlp.act"}


def weight_names(tap: str, operation: str, facts: Facts) -> dict[str, str]:
    """The checkpoint's names of what the operation needs, by role."""
    model, kind, layer = facts.model, local_name(tap), layer_of(tap)
    if operation == "embedding":
        return {"weight": EMBEDDING}
    if operation == "head":
        return {"weight": EMBEDDING if model.tie_embeddings else HEAD}
    if operation == "norm":
        return {
            "weight": "model.norm.weight" if layer is None else f"model.layers.{layer}.{NORMS[kind]}.weight"
        }
    if operation not in ("linear", "reduce"):
        return {}
    module = f"model.layers.{layer}.{MODULES[kind.removesuffix('.partial')]}"
    biased = f"{module}.bias" in shards.parameters(model) and not kind.endswith(".partial")
    return ({} if operation == "reduce" else {"weight": f"{module}.weight"}) | (
        {"bias": f"{module}.bias"} if biased else {}
    )


def whose(name: str, layer: int | None) -> tuple[str, str]:
    """Whose tensor that is, as seen from a layer, and its name there: ("the next layer", "mlp.up_proj.weight")."""
    tap = name.removeprefix("model.")
    at = layer_of(tap)
    if at is None:
        return "the model", tap
    if layer is None:
        return f"layer {at}", local_name(tap)
    words = {layer: "the same layer", layer + 1: "the next layer", layer - 1: "the layer before"}
    return words.get(at, f"layer {at}"), local_name(tap)


def rank_spans(
    tap: str, operation: str, rank: int, taps: RecordedTaps, facts: Facts
) -> tuple[slice | None, slice | None]:
    """(out features, in features) of this rank, of heads where the tensor has an axis of them; None: all."""
    ranks, kind, model = len(taps.ranks), local_name(tap), facts.model
    if ranks == 1:
        return None, None
    if kind in ("attn.o_proj.partial", "mlp.down.partial"):
        before = near(BEFORE[kind.removesuffix(".partial")], layer_of(tap), 0)
        width = model.num_heads * model.head_dim if kind.startswith("attn") else model.intermediate_size
        return None, _part(before, rank, taps, width)
    if operation not in ("linear", "head") or kind in BEFORE:
        return None, None
    widths = {
        "attn.q_proj": model.num_heads * model.head_dim,
        **dict.fromkeys(("attn.k_proj", "attn.v_proj"), model.num_kv_heads * model.head_dim),
        "logits": model.vocab_size,
    }
    return _part(tap, rank, taps, widths.get(kind, model.intermediate_size)), None


def _part(tap: str, rank: int, taps: RecordedTaps, width: int) -> slice | None:
    """The columns of `width` that a rank holds: as the parts were recorded if they add up, else as they should be."""
    layout, ranks = taps.recording.layout(tap), len(taps.ranks)
    if layout.kind != "shard" or ranks % layout.replicas:
        return None
    held = [taps.tensors(tap, group.start) for group in shard_groups(layout, ranks)]
    sizes = [next((x.shape[-1] for x in tensors if x is not None and x.ndim), 0) for tensors in held]
    if sum(sizes) != width:
        sizes = [shards.cropped(width, len(sizes), i).size for i in range(len(sizes))]
    number = rank // layout.replicas
    start = sum(sizes[:number])
    return slice(start, start + sizes[number])


def head_offset(site: Site) -> int:
    """The number in the whole model of this rank's first head (KV head at k and v)."""
    model, ranks = site.facts.model, len(site.taps.ranks)
    many = model.num_kv_heads if site.kind.startswith(("attn.k", "attn.v")) else model.num_heads
    try:
        if many == model.num_heads:
            return shards.heads(model, ranks, site.rank).start
        return shards.kv_heads(model, ranks, site.rank).start
    except ConfigError:
        return 0
