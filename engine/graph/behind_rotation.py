"""What becomes of queries and keys behind the rotation, without weights: each head over its root mean square, in layers
that rotate (Llama 4); and a factor of queries that grows with their position (`config.query_scaling`)."""

from __future__ import annotations

from lockstep.engine.graph.operation import Operation

BEHIND_ROTATION = (
    Operation("attn.q_unit_norm", "unit_norm", {"x": "attn.q_rope"}, "heads", "heads", part="unit_qk_norm"),
    Operation(
        "attn.k_unit_norm", "unit_norm", {"x": "attn.k_rope"}, "kv_heads", "heads", part="unit_qk_norm"
    ),
    Operation("attn.q_scaled", "query_scaling", {"x": "attn.q_rope"}, "heads", "heads", part="query_scaling"),
)
