"""Which taps each tap is computed from: what tells an inherited error from one of the operation's own."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER_TAP = re.compile(r"layers\.(\d+)\.(.+)")

#: Inputs of the taps of one layer, by their short names; `<` is the output of the layer before.
_INPUTS: dict[str, tuple[str, ...]] = {
    "attn_norm": ("<",),
    "attn.q_proj": ("attn_norm",),
    "attn.k_proj": ("attn_norm",),
    "attn.v_proj": ("attn_norm",),
    "attn.q_norm": ("attn.q_proj",),
    "attn.k_norm": ("attn.k_proj",),
    "attn.q_rope": ("attn.q_norm", "attn.q_proj"),
    "attn.k_rope": ("attn.k_norm", "attn.k_proj"),
    "attn.k_cache": ("attn.k_rope",),
    "attn.v_cache": ("attn.v_proj",),
    "attn.scores": ("attn.q_rope", "attn.k_cache"),
    "attn.probs": ("attn.scores",),
    "attn.context": ("attn.probs", "attn.v_cache"),
    "attn.o_proj.partial": ("attn.context",),
    "attn.o_proj": ("attn.o_proj.partial", "attn.context"),
    "attn_residual": ("<", "attn.o_proj"),
    "mlp_norm": ("attn_residual",),
    "mlp.gate": ("mlp_norm",),
    "mlp.up": ("mlp_norm",),
    "mlp.act": ("mlp.gate", "mlp.up"),
    "mlp.down.partial": ("mlp.act",),
    "mlp.down": ("mlp.down.partial", "mlp.act"),
    "mlp_residual": ("attn_residual", "mlp.down"),
}

#: Tap kind -> the checkpoint's module whose output it is.
MODULES: dict[str, str] = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
#: Taps that engines compute in one fused product.
QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
GATE_UP = ("mlp.gate", "mlp.up")

#: Taps that also hold what earlier steps have written.
REMEMBERING = ("attn.k_cache", "attn.v_cache")


def layer_of(tap: str) -> int | None:
    """The layer of a tap, None for `embed`, `final_norm` and `logits`."""
    match = _LAYER_TAP.fullmatch(tap)
    return int(match[1]) if match else None


def count_layers(taps: Iterable[str]) -> int:
    """How many decoder layers the taps belong to."""
    return len({layer_of(tap) for tap in taps} - {None})


def kind_of(tap: str) -> str:
    """The tap's name without its layer: `attn.q_proj`, `embed`."""
    match = _LAYER_TAP.fullmatch(tap)
    return match[2] if match else tap


def inputs_of(tap: str, num_layers: int = 0) -> tuple[str, ...]:
    """The taps that `tap` is computed from, nearest first. Names of taps that a model lacks
    (q_norm, partial sums) are among them: skip those that a session does not know.

    `num_layers` matters for `final_norm` alone."""
    if tap == "embed":
        return ()
    if tap == "final_norm":
        return (f"layers.{num_layers - 1}.mlp_residual",)
    if tap == "logits":
        return ("final_norm",)
    layer, kind = layer_of(tap), kind_of(tap)
    assert layer is not None, f"{tap} is not a tap of the design"
    before = f"layers.{layer - 1}.mlp_residual" if layer else "embed"
    return tuple(before if name == "<" else f"layers.{layer}.{name}" for name in _INPUTS[kind])
