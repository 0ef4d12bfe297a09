"""Biases that are lost while loading."""

from __future__ import annotations

from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import qkv_biases


def skip_qkv_bias(name: str) -> bool:
    """Everything is loaded but the biases of q, k and v."""
    return not name.endswith((".q_proj.bias", ".k_proj.bias", ".v_proj.bias"))


def skip_k_bias(name: str) -> bool:
    """The biases of k look too large and are left out."""
    return not name.endswith(".k_proj.bias")


FAULTS = (
    Fault(
        id="bias-not-loaded",
        seam="load_bias",
        value="false",
        correct="true",
        title="q/k/v biases never loaded",
        group="bias",
        level="load",
        first_tap="layers.*.attn.q_proj",
        symptom="every token's q, k and v are off by the same vector: minus the bias",
        patch={"load_bias": skip_qkv_bias},
        needs=qkv_biases,
    ),
    Fault(
        id="k-bias-disabled",
        seam="load_bias",
        value="without_k",
        correct="true",
        title="k biases left out, for they look corrupt",
        group="bias",
        level="load",
        first_tap="layers.*.attn.k_proj",
        symptom="every token's k is off by the same vector, minus the bias; q and v are right",
        patch={"load_bias": skip_k_bias},
        needs=qkv_biases,
    ),
)
