"""Names of the checkpoints' modules that differ from Llama's, by family (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.config import Family

#: Family -> tap -> module within the layer.
MODULES: Mapping[Family, Mapping[str, str]] = {
    "olmo2": {
        "post_attn_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
