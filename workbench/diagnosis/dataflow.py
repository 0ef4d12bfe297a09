"""Which taps each tap is computed from: what tells an inherited error from one of the operation's own."""

from __future__ import annotations

from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.judgement import DiagnosisError

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


#: Taps outside the layers, with their inputs.
_OUTSIDE: dict[str, tuple[str, ...]] = {"embed": (), "final_norm": ("<",), "logits": ("final_norm",)}


class UnknownTap(DiagnosisError):
    """A name that is none of the design's: what it is computed from is not known."""


def is_known(tap: str) -> bool:
    """Whether the data flow has a place for the tap. A stranger's session may name its taps anyhow."""
    if layer_of(tap) is None:
        return tap in _OUTSIDE
    return local_name(tap) in _INPUTS


def inputs_of(tap: str, num_layers: int = 0) -> tuple[str, ...]:
    """The taps that `tap` is computed from, nearest first. Names of taps that a model lacks
    (q_norm, partial sums) are among them: skip those that a session does not know.

    `num_layers` matters for `final_norm` alone. UnknownTap for a name that is none of the design's."""
    if not is_known(tap):
        raise UnknownTap(
            f"{clean(tap, limit=120)} is no tap of a decoder: what it is computed from is not known"
        )
    layer = layer_of(tap)
    if layer is None:
        names, layer, prefix = _OUTSIDE[tap], num_layers, ""
    else:
        names, prefix = _INPUTS[local_name(tap)], f"layers.{layer}."
    before = f"layers.{layer - 1}.mlp_residual" if layer else "embed"
    return tuple(before if name == "<" else prefix + name for name in names)
