"""What a rank holds of an operation: which of the checkpoint's tensors, and which rows and columns of them."""

from __future__ import annotations

from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.graph import LAYER, OUTSIDE, operation_of
from lockstep.engine.graph.layer_inputs import NORM
from lockstep.engine.graph.mamba_vectors import ssm_vectors
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.sizes import size_of
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of, local_name, operation_at
from lockstep.sessions.layouts import shard_groups
from lockstep.workbench.diagnosis.operations.attention import FUSED
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.mixture import MIXTURE, inside
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site

EMBEDDING, HEAD = (f"{OUTSIDE[tap].module}.weight" for tap in ("embed", "logits"))


def module_of(tap: str, model: ModelConfig) -> str:
    """The checkpoint's module at a tap, whole; "" where it has none."""
    operation, layer = operation_of(model, local_name(tap)), layer_of(tap)
    if operation is None or not operation.module or layer is None:
        return operation.module if operation is not None else ""
    return f"model.layers.{layer}.{operation.module}"


def weight_names(tap: str, operation: str, facts: Facts) -> dict[str, str]:
    """The checkpoint's names of what the operation needs, by role; of experts with `{}` for the number of one."""
    module, declared = module_of(tap, facts.model), operation_at(tap)
    if operation == "head":
        weight = {"weight": EMBEDDING if facts.model.tie_embeddings else f"{module}.weight"}
        return weight | ({"bias": shards.HEAD_BIAS} if facts.model.head_bias else {})
    if operation == "embedding":
        return {"weight": f"{module}.weight"}
    if operation == "choice":
        corrected = facts.model.experts is not None and facts.model.experts.correction
        name = f"model.layers.{layer_of(tap)}.{shards.correction_name(facts.model)}" if corrected else ""
        return {"correction": name} if corrected else {}
    if operation == "choice_weights" and facts.model.experts is not None and facts.model.experts.beside_mlp:
        return {"expert_scale": f"model.layers.{layer_of(tap)}.{shards.EXPERT_SCALE}"}
    if operation == "channel_scale":
        return {"weight": f"model.layers.{layer_of(tap)}.{shards.ROUTER_SCALE}"}
    if operation in ("softmax", *FUSED):
        return {"sinks": f"model.layers.{layer_of(tap)}.{shards.SINKS}"} if facts.model.sinks else {}
    if operation == "decay":
        return {role: f"model.layers.{layer_of(tap)}.{name}" for role, name in shards.DECAY.items()}
    if operation == "activation" and facts.model.activation == "xielu":
        return {role: f"model.layers.{layer_of(tap)}.{name}" for role, name in shards.XIELU.items()}
    if operation in ("conv", "gated_norm"):
        bias = operation == "conv" and facts.model.conv_bias
        return {"weight": f"{module}.weight"} | ({"bias": f"{module}.bias"} if bias else {})
    if vectors := ssm_vectors(facts.model, operation):
        return {role: f"model.layers.{layer_of(tap)}.{name}" for role, name in vectors.items()}
    if operation == MIXTURE:
        return {
            f"{one.tap}.{role}": name
            for one in inside(facts.model, ())
            for role, name in weight_names(near(one.tap, layer_of(tap), 0), one.kind, facts).items()
        }
    if operation == "layer_inputs":
        return {"weight": f"{NORM}.weight"}
    if operation == "residual":
        own = operation_of(facts.model, local_name(tap))
        scaled = own is not None and own.scaled
        return {"layer_scalar": f"model.layers.{layer_of(tap)}.{shards.LAYER_SCALAR}"} if scaled else {}
    if operation not in ("linear", "reduce", "norm", "experts"):
        return {}
    biased = declared is not None and declared.bias and getattr(facts.model, declared.bias)
    bare = operation == "reduce" or (operation == "norm" and not facts.model.norm_weight)
    return ({} if bare else {"weight": f"{module}.weight"}) | ({"bias": f"{module}.bias"} if biased else {})


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
    ranks, model = len(taps.ranks), facts.model
    if ranks == 1:
        return None, None
    declared = (None if facts.model_free else operation_of(model, local_name(tap))) or operation_at(tap)
    if declared is None:
        return None, None
    if declared.summed and operation in ("linear", "experts"):
        read = declared.inputs["x"]
        return None, _part(near(read, layer_of(tap), 0), rank, taps, size_of(LAYER[read].width, model))
    whole_norm = operation == "norm" and model.qk_norm_whole
    cut = operation in ("linear", "head", "experts", "conv", "decay", "step_size", "ssm_state", "ssm_read")
    cut = cut or (operation == "gated_norm" and model.mamba is not None)
    if not (cut or whole_norm) or not declared.sharded:
        return None, None
    if whole_norm:
        tap = near(next(iter(declared.inputs.values())), layer_of(tap), 0)
    if operation in ("ssm_state", "ssm_read"):  # vectors of heads
        return _part(near("attn.ssm_step", layer_of(tap), 0), rank, taps, size_of("ssm_heads", model)), None
    return _part(tap, rank, taps, size_of(declared.width, model)), None


def _part(tap: str, rank: int, taps: RecordedTaps, width: int) -> slice | None:
    """The columns of `width` that a rank holds: as the parts were recorded if they add up, else as they should be."""
    layout, ranks = taps.recording.layout(tap), len(taps.ranks)
    if layout.kind != "shard" or ranks % (layout.replicas * layout.groups):
        return None
    held = [taps.tensors(tap, group.start) for group in shard_groups(layout, ranks)]
    sizes = [next((x.shape[-1] for x in tensors if x is not None and x.ndim), 0) for tensors in held]
    count = len(sizes) // layout.groups
    group, number = divmod(rank // layout.replicas, count)
    sizes = sizes[group * count : (group + 1) * count]
    if sum(sizes) != width:
        sizes = [shards.cropped(width, count, i).size for i in range(count)]
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
