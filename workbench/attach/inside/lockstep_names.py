"""What the parts of a model are called in transformers, and in vLLM, SGLang and nano-vllm, and which taps they are."""

from __future__ import annotations

from .lockstep_linear import CONVOLUTIONS, LINEAR
from .lockstep_mamba import MAMBA, NEMOTRON_H

#: A map: module -> what to take of it -> the tap that this is. Outside the layers a module goes by its last name.
#: Inside, module ".x" is the layer's part x, "" the layer itself; tap ".x" is the layer's own, "<.x" the one before's.
#: To take: "in", what goes in; "out", what comes out; "sum", the second of a pair; "q", "k", "v", cut by how much wider
#: queries are; "left", "right", halves; "partial", the product before the all-reduce; "rotary q", "rotary k", what
#: apply_rotary_pos_emb returns; "unrotated q", "unrotated k", what goes into a rotating module; "chosen", "weights",
#: the experts and their weights that go into a module of experts; "routed", "routed weights", those that vLLM's router
#: returns, "expert sum", what its runner hands to the all-reduce; and those of lockstep_linear, lockstep_mamba,
#: lockstep_falcon_h1, lockstep_gemma4, lockstep_llama4, lockstep_latent, lockstep_indexer.
Names = dict[str, dict[str, str]]
BOTH: Names = {
    "embed_tokens": {"multiplied": "embed"},
    ".self_attn.q_norm": {"out": ".attn.q_norm"},
    ".self_attn.k_norm": {"out": ".attn.k_norm"},
    ".mlp.gate": {"out": ".mlp.router"},
    ".mlp.gate.wg": {},
    ".mlp.gate.moe_statics": {},
    ".mlp.router": {"out": ".mlp.router"},
    ".mlp": {"out": ".mlp.combine"},  # where it has experts
    ".mlp.shared_expert_gate": {"out": ".mlp.shared_gate"},
    ".post_self_attn_layernorm": {"out": ".post_attn_norm"},
    ".post_mlp_layernorm": {"out": ".post_mlp_norm"},
    ".post_norm1": {"out": ".post_attn_norm"},
    ".post_norm2": {"out": ".post_mlp_norm"},
    "lm_head": {"out": "logits"},
}
#: Where the norms of heads stand behind the rotation.
NORMED_BEHIND = {
    f".self_attn.{module}_layernorm": {"turned": f".attn.{one}_rope_norm"}
    for module, one in (("query", "q"), ("key", "k"))
}
TRANSFORMERS: Names = BOTH | {
    "lm_head": {"finished": "logits"},
    "": {"out": ".mlp_residual"},
    ".input_layernorm": {"out": ".attn_norm"},
    ".self_attn": {"rotary q": ".attn.q_rope", "rotary k": ".attn.k_rope"},
    ".self_attn.q_proj": {"out": ".attn.q_proj"},
    ".self_attn.k_proj": {"out": ".attn.k_proj"},
    ".self_attn.v_proj": {"out": ".attn.v_proj"},
    ".self_attn.qkv_proj": {"q": ".attn.q_proj", "k": ".attn.k_proj", "v": ".attn.v_proj"},
    **NORMED_BEHIND,
    ".self_attn.q_a_proj": {"out": ".attn.q_a_proj"},
    ".self_attn.q_a_layernorm": {"out": ".attn.q_a_norm"},
    ".self_attn.q_b_proj": {"out": ".attn.q_b_proj"},
    ".self_attn.kv_a_proj_with_mqa": {"out": ".attn.kv_a_proj"},
    ".self_attn.kv_a_layernorm": {"out": ".attn.kv_a_norm"},
    ".self_attn.o_proj": {"in": ".attn.context", "out": ".attn.o_proj"},
    ".post_attention_layernorm": {"in": ".attn_residual", "out": ".mlp_norm"},
    ".attention_layernorm": {"out": ".attn_norm"},
    ".feedforward_layernorm": {"in": ".attn_residual", "out": ".mlp_norm"},
    ".pre_feedforward_layernorm": {"in": ".attn_residual", "out": ".mlp_norm"},
    ".mlp.gate_proj": {"out": ".mlp.gate"},
    ".mlp.up_proj": {"out": ".mlp.up"},
    ".mlp.gate_up_proj": {"left": ".mlp.gate", "right": ".mlp.up"},
    ".mlp.c_fc": {"out": ".mlp.up"},
    ".mlp.c_proj": {"in": ".mlp.act", "out": ".mlp.down"},
    ".self_attn.dense": {"in": ".attn.context", "out": ".attn.o_proj"},
    ".self_attn.q_layernorm": {"out": ".attn.q_norm"},
    ".self_attn.k_layernorm": {"out": ".attn.k_norm"},
    ".mlp.fc1": {"out": ".mlp.up"},
    ".mlp.fc2": {"in": ".mlp.act", "out": ".mlp.down"},
    ".self_attn.out_proj": {"in": ".attn.context", "out": ".attn.o_proj"},
    ".operator_norm": {"out": ".attn_norm"},
    ".pre_ff_layernorm": {"in": ".attn_residual", "out": ".mlp_norm"},
    ".ffn_norm": {"in": ".attn_residual", "out": ".mlp_norm"},
    ".mlp.w1": {"out": ".mlp.gate"},
    ".mlp.w3": {"out": ".mlp.up"},
    ".mlp.w2": {"in": ".mlp.act", "out": ".mlp.down"},
    ".resid_dropout": {},
    ".mlp.act": {},
    ".mlp.act_fn": {},
    ".mlp.activation_fn": {},
    ".mlp.down_proj": {"in": ".mlp.act", "out": ".mlp.down"},
    ".mlp.experts": {"chosen": ".mlp.topk_ids", "weights": ".mlp.topk_weights"},
    ".mlp.experts.act_fn": {},
    "norm": {"out": "final_norm"},
    "final_layernorm": {"out": "final_norm"},
    "embedding_norm": {"out": "final_norm"},
    "embed_dropout": {},
    "rotary_emb": {},
    "pos_emb": {},
    **LINEAR,
    **CONVOLUTIONS,
    **MAMBA,
    **NEMOTRON_H,
}
FUSED: Names = BOTH | {
    ".input_layernorm": {"sum": "<.mlp_residual", "out": ".attn_norm"},
    ".self_attn.qkv_proj": {"q": ".attn.q_proj", "k": ".attn.k_proj", "v": ".attn.v_proj"},
    ".self_attn.rotary_emb": {"out": ".attn.q_rope", "sum": ".attn.k_rope"},
    ".self_attn.attn": {"out": ".attn.context"},
    ".self_attn.o_proj": {"partial": ".attn.o_proj.partial", "out": ".attn.o_proj"},
    ".post_attention_layernorm": {"sum": ".attn_residual", "out": ".mlp_norm"},
    ".mlp.gate_up_proj": {"left": ".mlp.gate", "right": ".mlp.up"},
    ".mlp.act_fn": {"out": ".mlp.act"},
    ".mlp.down_proj": {"partial": ".mlp.down.partial", "out": ".mlp.down"},
    ".mlp.experts": {
        "routed": ".mlp.topk_ids",
        "routed weights": ".mlp.topk_weights",
        "expert sum": ".mlp.combine.partial",
    },
    "norm": {"sum": "<.mlp_residual", "out": "final_norm"},
    "logits_processor": {"out": "logits"},
}
#: Where norms are over all heads: these may be gathered for it, or no norm be called but its formula, so that what is
#: rotated is taken.
OVER_ALL_HEADS: Names = {
    ".self_attn.q_norm": {},
    ".self_attn.k_norm": {},
    ".self_attn.rotary_emb": {"unrotated q": ".attn.q_norm", "unrotated k": ".attn.k_norm"}
    | FUSED[".self_attn.rotary_emb"],
}
#: Where norms stand behind the blocks under names that mean other places elsewhere.
BEHIND: Names = {
    ".post_attention_layernorm": {"out": ".post_attn_norm"},
    ".post_feedforward_layernorm": {"out": ".post_mlp_norm"},
}
#: Beside Gemma-3 the models of transformers that norm heads as [B, heads, T, D].
HEADS_FIRST = ("exaone4", "exaone_moe", "apertus", "phi")
#: Those that give the rotation only the part of each head that is rotated.
IN_PART = ("stablelm", "nemotron", "phi")
#: Those of whose layers transformers' plans divide the experts alone.
UNDIVIDED = ("lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h", "bamba", "falcon_h1")
TURNED: Names = {
    f".self_attn.{one}_{norm}": {"turned": f".attn.{one}_norm"}
    for one in "qk"
    for norm in ("norm", "layernorm")
}
