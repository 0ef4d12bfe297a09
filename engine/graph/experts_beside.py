"""The operations that a layer has where experts stand beside its MLP (Gemma-4): norms of what each reads and gives, the
router's own, and the sum of both (torch-free).
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Operation


def _norm(tap: str, read: str, module: str, gguf: str) -> Operation:
    return Operation(tap, "norm", {"x": read}, "hidden", "rows", module, gguf, "norm_bias", part="beside_mlp")


_AFTER, _BEFORE = "post_feedforward_layernorm", "pre_feedforward_layernorm"
#: Behind the MLP, before the router.
BEFORE_EXPERTS = (
    _norm("mlp.dense_norm", "mlp.down", f"{_AFTER}_1", "post_ffw_norm_1"),
    Operation(
        "mlp.router_norm", "unit_norm", {"x": "attn_residual"}, module="router.norm", part="beside_mlp"
    ),
    Operation("mlp.router_input", "channel_scale", {"x": "mlp.router_norm"}, part="beside_mlp"),
    _norm("mlp.experts_norm", "attn_residual", f"{_BEFORE}_2", "pre_ffw_norm_2"),
)
#: Behind the experts.
BEHIND_EXPERTS = (
    _norm("mlp.combine_norm", "mlp.combine", f"{_AFTER}_2", "post_ffw_norm_2"),
    Operation("mlp.sum", "residual", {"x": "mlp.dense_norm", "y": "mlp.combine_norm"}, part="beside_mlp"),
)
#: What operations read there.
BESIDE_MLP = {
    "mlp.router": {"x": "mlp.router_input"},
    **{f"mlp.experts.{one}": {"x": "mlp.experts_norm", "ids": "mlp.topk_ids"} for one in ("gate", "up")},
}
