"""The operations of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token's latent and the part of its key that is rotated are whole on every rank, and are what is cached. Each rank
makes its heads' keys and values of the cached latents.
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Operation

#: In place of q, k and v, up to what is rotated.
PROJECTIONS = (
    Operation(
        "attn.q_a_proj", "linear", {"x": "attn_norm"}, "query_latent", module="self_attn.q_a_proj", gguf="attn_q_a",
        bias="latent_bias", part="query_latent",
    ),
    Operation(
        "attn.q_a_norm", "norm", {"x": "attn.q_a_proj"}, "query_latent", module="self_attn.q_a_layernorm",
        gguf="attn_q_a_norm", part="query_latent",
    ),
    Operation(
        "attn.q_b_proj", "linear", {"x": "attn.q_a_norm"}, "heads", module="self_attn.q_b_proj", gguf="attn_q_b",
        part="query_latent",
    ),
    Operation(
        "attn.kv_a_proj", "linear", {"x": "attn_norm"}, "written_latent", module="self_attn.kv_a_proj_with_mqa",
        gguf="attn_kv_a_mqa", bias="latent_bias", part="latent",
    ),
    Operation(
        "attn.kv_a_norm", "norm", {"x": "attn.kv_a_proj"}, "latent", module="self_attn.kv_a_layernorm",
        gguf="attn_kv_a_norm", part="latent",
    ),
)  # fmt: skip
ROPE_KEY = Operation("attn.rope_key", "rope", {"x": "attn.kv_a_proj"}, "rope_key", "heads", part="latent")
#: From what is cached to what scores and contexts read.
EXPANSION = (
    Operation("attn.latent_cache", "cache", {"written": "attn.kv_a_norm"}, "latent", "cache", part="latent"),
    Operation("attn.rope_cache", "cache", {"written": "attn.rope_key"}, "rope_key", "cache", part="latent"),
    Operation(
        "attn.kv_b_proj", "linear", {"x": "attn.latent_cache"}, "expanded_heads", "cached_rows",
        module="self_attn.kv_b_proj", gguf="attn_kv_b", part="latent",
    ),
    Operation(
        "attn.keys", "keys", {"expanded": "attn.kv_b_proj", "rope": "attn.rope_cache"}, "heads", "cache", part="latent"
    ),
    Operation("attn.values", "values", {"expanded": "attn.kv_b_proj"}, "value_heads", "cache", part="latent"),
)  # fmt: skip
