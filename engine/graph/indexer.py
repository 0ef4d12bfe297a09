"""The operations of an indexer, which chooses the keys that queries attend to (DeepSeek-V3.2, arXiv:2512.02556).

All of it is whole on every rank. What is chosen of each query are rows of what is cached, ascending, after as many -1
as there are fewer keys than may be chosen.
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Operation

#: What is made of each token.
PROJECTIONS = (
    Operation(
        "attn.index_q_proj", "linear", {"x": "attn.q_a_norm"}, "index_heads", module="self_attn.indexer.wq_b",
        part="indexer",
    ),
    Operation(
        "attn.index_k_proj", "linear", {"x": "attn_norm"}, "index_key", module="self_attn.indexer.wk",
        part="indexer",
    ),
    Operation(
        "attn.index_k_norm", "norm", {"x": "attn.index_k_proj"}, "index_key", module="self_attn.indexer.k_norm",
        bias="index_bias", part="indexer",
    ),
    Operation("attn.index_q_rope", "rope", {"x": "attn.index_q_proj"}, "index_heads", "heads", part="indexer"),
    Operation("attn.index_k_rope", "rope", {"x": "attn.index_k_norm"}, "index_key", "heads", part="indexer"),
    Operation(
        "attn.index_weights", "linear", {"x": "attn_norm"}, "index_weights",
        module="self_attn.indexer.weights_proj", part="indexer",
    ),
)  # fmt: skip
#: What is made of all that is cached; or another layer's choice.
CHOICE = (
    Operation("attn.index_k_cache", "cache", {"written": "attn.index_k_rope"}, "index_key", "cache", part="indexer"),
    Operation(
        "attn.index_scores", "index_scores",
        {"q": "attn.index_q_rope", "k": "attn.index_k_cache", "weights": "attn.index_weights"}, "one", "cells",
        part="indexer",
    ),
    Operation("attn.index_chosen", "key_choice", {"scores": "attn.index_scores"}, "index_slots", part="indexer"),
    Operation("attn.shared_chosen", "shared_choice", {"ids": "attn.index_chosen"}, "index_slots", part="shared_choice"),
)  # fmt: skip
