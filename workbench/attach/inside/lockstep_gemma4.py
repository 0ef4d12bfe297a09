"""What Gemma-4 in transformers shows beside other models: norms of values, which may be what the product of keys gives,
inputs of each layer's own, and experts beside the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

#: In place of what is taken of other models (`lockstep_modules.Names`): it rotates queries and keys one at a time, and
#: norms each token's heads.
GEMMA4: dict[str, dict[str, str]] = {
    ".self_attn": {"rotated q": ".attn.q_rope", "rotated k": ".attn.k_rope"},
    ".self_attn.q_norm": {"out": ".attn.q_norm"},
    ".self_attn.k_norm": {"out": ".attn.k_norm"},
    ".self_attn.v_norm": {"out": ".attn.v_norm"},
    ".act_fn": {},
}
#: Of models with per-layer inputs.
LAYER_INPUTS: dict[str, dict[str, str]] = {
    "embed_tokens_per_layer": {"out": "layer_inputs.embed", "all layers": "layer_inputs"},
    "per_layer_model_projection": {"out": "layer_inputs.proj"},
    "per_layer_projection_norm": {},
    "": {"out": ".mlp_residual", "second": ".layer_input"},
    ".per_layer_input_gate": {"in": ".mlp_stream", "out": ".layer_input.gate"},
    ".per_layer_projection": {"in": ".layer_input.act", "out": ".layer_input.proj"},
    ".post_per_layer_input_norm": {"out": ".post_layer_input_norm"},
}
#: Of models with experts beside the MLP.
EXPERTS_BESIDE: dict[str, dict[str, str]] = {
    ".post_feedforward_layernorm_1": {"out": ".mlp.dense_norm"},
    ".router.norm": {"out": ".mlp.router_norm"},
    ".router.proj": {"in": ".mlp.router_input", "out": ".mlp.router"},
    ".pre_feedforward_layernorm_2": {"out": ".mlp.experts_norm"},
    ".experts": {"chosen": ".mlp.topk_ids", "weights": ".mlp.topk_weights", "out": ".mlp.combine"},
    ".experts.act_fn": {},
    ".post_feedforward_layernorm_2": {"out": ".mlp.combine_norm"},
    ".post_feedforward_layernorm": {"in": ".mlp.sum", "out": ".post_mlp_norm"},
}
GEMMA4_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    "rotated q": lambda x, owner: x,
    "rotated k": lambda x, owner: x,
    "second": lambda x, owner: x[1],
    "all layers": lambda x, owner: x.flatten(-2),  # [B, T, layers, width]
    "as values": lambda x, owner: x,
}


def gemma4_names(parts: set[str]) -> dict[str, dict[str, str]]:
    """What of the map is another one in a model with these parts in its layers; empty for other models."""
    if ".self_attn.v_norm" not in parts:
        return {}
    found = GEMMA4 | (LAYER_INPUTS if ".per_layer_input_gate" in parts else {})
    return found | (EXPERTS_BESIDE if ".router.proj" in parts else {})


def more_of(local: str, owner: Any) -> dict[str, str]:
    """What is taken of a part in single layers: of the product of keys the values, where they have none of their
    own."""
    has_none = local == ".self_attn.k_proj" and getattr(owner, "v_proj", owner) is None
    return {"as values": ".attn.v_proj"} if has_none else {}


def rotated_calls(part: nn.Module, take: str, undo: list[Callable[[], None]]) -> Callable[[Any], bool] | None:
    """Of calls of the rotation, which are of that attention's queries or keys: those on what its norm has given. None
    where it has no such norm. `undo` gets what takes the hook away again."""
    norm = getattr(part, f"{take[-1]}_norm", None)
    if norm is None:
        return None
    given: list[Any] = []

    def remember(_: Any, args: Any, out: Any) -> None:
        given[:] = [out]

    undo.append(norm.register_forward_hook(remember).remove)
    return lambda args: bool(given) and args[0] is given[0]
