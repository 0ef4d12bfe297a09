"""The operations of a model whose blocks have multipliers, and the sum of blocks side by side.

Each is one number times what another operation gives, and has a tap of its own: a multiplier that is left out, or meets
another tensor, is found at its tap.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.graph.mamba import PROJECTED, PROJECTED_WIDTHS
from lockstep.engine.graph.operation import STREAM, Operation, Width

_OF_PARTS = {f"{tap}_scaled": tap.rpartition("_")[2] for tap in PROJECTED}
#: Tap -> the field of `Multipliers`.
FACTORS: Mapping[str, str] = {
    "attn.in_scaled": "attention_in",
    "attn.k_scaled": "key",
    "attn.o_scaled": "attention_out",
    "attn.ssm_in_scaled": "ssm_in",
    **_OF_PARTS,
    "attn.out_scaled": "ssm_out",
    "mlp.gate_scaled": "gate",
    "mlp.down_scaled": "down",
}


def _scaled(tap: str, read: str, width: Width = "hidden") -> Operation:
    return Operation(tap, "multiplier", {"x": read}, width, part="multiplied")


IN_SCALED = _scaled("attn.in_scaled", "attn_norm")
K_SCALED = _scaled("attn.k_scaled", "attn.k_proj", "kv_heads")
O_SCALED = _scaled("attn.o_scaled", "attn.o_proj")
SSM_IN_SCALED = _scaled("attn.ssm_in_scaled", "attn_norm")
PARTS_SCALED = tuple(
    _scaled(f"{tap}_scaled", tap, width) for tap, width in zip(PROJECTED, PROJECTED_WIDTHS, strict=True)
)
OUT_SCALED = _scaled("attn.out_scaled", "attn.out_proj")
GATE_SCALED = _scaled("mlp.gate_scaled", "mlp.gate", "intermediate")
DOWN_SCALED = _scaled("mlp.down_scaled", "mlp.down")
#: What both blocks give.
BESIDE = Operation("attn.mixed", "mixed", {"x": "attn.out_scaled", "y": "attn.o_scaled"}, part="beside")
_GATE = {"gate": "attn.ssm_z_scaled"}
#: What operations read instead where there are multipliers and both blocks.
SCALED_INPUTS: Mapping[str, Mapping[str, str]] = {
    **{f"attn.{one}_proj": {"x": "attn.in_scaled"} for one in "qkv"},
    "attn.k_rope": {"x": "attn.k_scaled"},
    **{tap: {"x": "attn.ssm_in_scaled"} for tap in PROJECTED},
    **{f"attn.ssm_conv_{one}": {"x": f"attn.ssm_{one}_scaled"} for one in "xbc"},
    "attn.ssm_step": {"x": "attn.ssm_dt_scaled"},
    "attn.ssm_norm": {"x": "attn.ssm_read", **_GATE},
    "attn.ssm_gated": {"up": "attn.ssm_read", **_GATE},
    "mlp.act": {"gate": "mlp.gate_scaled", "up": "mlp.up"},
    "attn_residual": {"x": STREAM, "y": "attn.mixed"},
    "mlp_residual": {"x": "attn_residual", "y": "mlp.down_scaled"},
}
