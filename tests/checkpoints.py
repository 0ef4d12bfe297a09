"""Tiny random checkpoints of every family and feature, written by transformers itself.

    path = tiny_checkpoint(tmp_path, "qwen3", num_key_value_heads=4)

Sizes divide by 2, 4 and 8 ranks except the vocabulary (131, a prime). Everything that a loader could drop
without a trace is random and away from its default: biases are not zero, norm weights are not one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    Jais2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma4_text": (Gemma4TextConfig, Gemma4ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "helium": (HeliumConfig, HeliumForCausalLM),
    "dots1": (Dots1Config, Dots1ForCausalLM),
    "phimoe": (PhimoeConfig, PhimoeForCausalLM),
    "apertus": (ApertusConfig, ApertusForCausalLM),
    "phi": (PhiConfig, PhiForCausalLM),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM),
    "bamba": (BambaConfig, BambaForCausalLM),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM),
    "olmo": (OlmoConfig, OlmoForCausalLM),
    "mistral4": (Mistral4Config, Mistral4ForCausalLM),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM),
    "llama4_text": (Llama4TextConfig, Llama4ForCausalLM),
    "exaone_moe": (ExaoneMoeConfig, ExaoneMoeForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "cwm": (CwmConfig, CwmForCausalLM),
    "internlm3": (InternLM3Config, LlamaForCausalLM),
    "iquestcoder": (IQuestCoderConfig, LlamaForCausalLM),
    "jais2": (Jais2Config, Jais2ForCausalLM),
    "hyperclovax": (HyperCLOVAXConfig, HyperCLOVAXForCausalLM),
    "solar_open": (SolarOpenConfig, SolarOpenForCausalLM),
    "youtu": (YoutuConfig, YoutuForCausalLM),
    "flex_olmo": (FlexOlmoConfig, FlexOlmoForCausalLM),
    "stablelm": (StableLmConfig, StableLmForCausalLM),
    "nemotron": (NemotronConfig, NemotronForCausalLM),
    "vaultgemma": (VaultGemmaConfig, VaultGemmaForCausalLM),
    "granitemoe": (GraniteMoeConfig, GraniteMoeForCausalLM),
    "ernie4_5_moe": (Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM),
    "hunyuan_v1_moe": (HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM),
    "hunyuan_v1_dense": (HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM),
    "cohere": (CohereConfig, CohereForCausalLM),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM),
    "arcee": (ArceeConfig, ArceeForCausalLM),
}

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
}
LATENT_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
#: With few heads scores are equal: 0 where no head has a positive product, with 8 of them once in 256 keys.
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
_GATED_SHARED: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip

#: Of families that are others but for a few flags.
_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16}
_SIDE: dict[str, Any] = {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": True, "layer_norm_eps": 1e-4,
}  # fmt: skip
_CORRECTED: dict[str, Any] = {
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip

OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "llama": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 8},
    "olmo2": {"num_key_value_heads": 4},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True,
                    "query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "num_hidden_layers": 4, "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gemma4_text": {"num_key_value_heads": 4, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2,
                    "attention_k_eq_v": True, "sliding_window": 8, "tie_word_embeddings": True,
                    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6,
                    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": 131, "final_logit_softcapping": 3.0},
    "phi3": {"num_key_value_heads": 4},
    "granite": {"num_key_value_heads": 4, "attention_multiplier": 0.3, "embedding_multiplier": 6.0,
                "residual_multiplier": 0.22, "logits_scaling": 4.0},
    "smollm3": {"num_key_value_heads": 4, "no_rope_layers": [1, 0, 1]},
    "starcoder2": {"num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 8},
    "glm4": {"num_key_value_heads": 4, "head_dim": 16},
    "olmo3": {"num_key_value_heads": 4, "sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                           "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    "qwen3_moe": {"num_key_value_heads": 4, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmoe": {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32},
    "qwen2_moe": {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0],
                  "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "glm4_moe": {"num_key_value_heads": 4, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
                 "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
                 "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 3, "n_shared_experts": 1, "topk_method": "group_limited_greedy",
                    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                    "num_nextn_predict_layers": 0, "rope_parameters": LATENT_YARN},
    "glm4_moe_lite": {**LATENT, "num_experts_per_tok": 2, "attention_bias": True},
    "deepseek_v32": {**LATENT, **_INDEXER, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                     "first_k_dense_replace": 1, "rope_parameters": LATENT_YARN},
    "glm_moe_dsa": {**LATENT, **_INDEXER, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
                    "indexer_types": ["full", "shared", "full"], "attention_bias": True},
    "gpt_oss": {"num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
                "intermediate_size": 32, "sliding_window": 8, "swiglu_limit": 1.5, "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 8.0, "truncate": False,
                    "original_max_position_embeddings": 32}},
    "minimax_m2": {"num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
                   "intermediate_size": 32, "rotary_dim": 8},
    "qwen3_next": {**_LINEAR, **_GATED_SHARED, "mlp_only_layers": [2]},
    "qwen3_5_text": {**_LINEAR, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**_LINEAR, **_GATED_SHARED},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True,
               "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma": {**_SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "seed_oss": {**_SMALL, "attention_out_bias": True},
    "exaone4": {**_SMALL, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": {**_SMALL, "tie_word_embeddings": True, "use_bias": True},
    "glm": _SMALL,
    "helium": {**_SMALL, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "dots1": {**_SMALL, **_CORRECTED, "n_shared_experts": 2, "n_routed_experts": 8, "norm_topk_prob": True,
              "sliding_window": 8, "max_window_layers": 1},
    "hunyuan_v1_dense": {**_SMALL, "attention_bias": True, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "cohere": {**_SIDE, "logit_scale": 0.3125, "attention_bias": True},
    "cohere2": {**_SIDE, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "arcee": {**_SMALL, "mlp_bias": True},
    "stablelm": {"num_hidden_layers": 2, "num_key_value_heads": 4, "use_qkv_bias": True, "layer_norm_eps": 1e-4},
    "nemotron": {**_SMALL, "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-4},
    "vaultgemma": {**_SMALL, "sliding_window": 8, "tie_word_embeddings": True, "query_pre_attn_scalar": 24,
                   "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "granitemoe": {"num_hidden_layers": 2, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 3,
                   "intermediate_size": 32, "attention_multiplier": 0.3, "embedding_multiplier": 6.0,
                   "residual_multiplier": 0.22, "logits_scaling": 4.0},
    "ernie4_5_moe": {**_SMALL, "tie_word_embeddings": True, "moe_num_experts": 8, "moe_k": 3,
                     "moe_intermediate_size": 32},
    "hunyuan_v1_moe": {**_SMALL, "num_experts": 8, "moe_topk": [3, 3], "intermediate_size": 32},
    "ministral3": {**_SMALL, "sliding_window": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    "ministral": {**_SMALL, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "cwm": {**_SMALL, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "internlm3": {**_SMALL, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": _SMALL,
    "jais2": {"num_hidden_layers": 2, "num_key_value_heads": 4, "layer_norm_eps": 1e-4},
    "hyperclovax": {"num_hidden_layers": 2, "num_key_value_heads": 4, "attention_multiplier": 0.3,
                    "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 0.3125},
    "solar_open": {**_SMALL, **_CORRECTED, "n_routed_experts": 8, "n_shared_experts": 2},
    "youtu": {**{key: value for key, value in LATENT.items() if "moe" not in key and "experts" not in key},
              "num_hidden_layers": 2, "tie_word_embeddings": True, "attention_bias": True},
    "flex_olmo": {"num_hidden_layers": 2, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3,
                  "intermediate_size": 32},
    "exaone_moe": {**_SMALL, **_CORRECTED, "num_experts": 8, "sliding_window": 8,
                   "layer_types": ["sliding_attention", "full_attention"]},
    "phimoe": {"num_hidden_layers": 2, "num_key_value_heads": 4, "num_local_experts": 8, "intermediate_size": 32,
               "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3, "rope_parameters": {
                   "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.5],
                   "long_factor": [1.0, 2.0, 5.0, 9.0], "short_mscale": 1.2, "long_mscale": 1.2,
                   "original_max_position_embeddings": 8}},
    "apertus": {"num_hidden_layers": 2, "num_key_value_heads": 4},
    "olmo": {"num_hidden_layers": 2, "num_key_value_heads": 4, "clip_qkv": 0.75},
    "lfm2": {"num_key_value_heads": 4, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-4,
             "block_multiple_of": 16, "tie_word_embeddings": True},
    "lfm2_moe": {"num_key_value_heads": 4, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-4,
                 "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                 "routed_scaling_factor": 1.5, "tie_word_embeddings": True},
    "nemotron_h": {
        "num_key_value_heads": 4, "head_dim": 16, "layer_norm_epsilon": 1e-4, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2},
    "bamba": {
        "num_key_value_heads": 4, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2,
        "mamba_d_state": 12, "mamba_chunk_size": 4},
    "falcon_h1": {
        "num_key_value_heads": 4, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_n_groups": 2,
        "mamba_d_state": 12, "mamba_chunk_size": 4, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.25,
        "key_multiplier": 0.4, "attention_in_multiplier": 0.75, "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.35, 1.5, 0.7, 0.45, 1.3],
        "mlp_multipliers": [0.9, 0.55]},
    "granitemoehybrid": {
        "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "shared_intermediate_size": 48,
        "attention_multiplier": 0.3, "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "logits_scaling": 4.0,
        "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 12, "mamba_chunk_size": 4},
    "phi": {"num_hidden_layers": 2, "num_key_value_heads": 4, "layer_norm_eps": 1e-4},
    "mistral4": {**LATENT, "num_hidden_layers": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                 "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "rope_parameters": {
                     **LATENT_YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}},
    "llama4_text": {**_SMALL, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
                    "intermediate_size": 32, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
                    "no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5},
}  # fmt: skip

#: Families whose norms' weights are added to 1, and lie around 0.
_ADDED_TO_ONE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

#: name -> (family, overrides): what "every family and feature" means in the tests.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral-window": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None}),
}
#: The same of the families that depart further from Llama.
FAMILY_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {}),
    "gemma4-dense": (
        "gemma4_text",
        {
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 2,
            "layer_types": None,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": (
        "phi3",
        {
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "glm4": ("glm4", {}),
    "olmo3": ("olmo3", {}),
    "starcoder2": ("starcoder2", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "glm4-moe": ("glm4_moe", {}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": LATENT_YARN | {"mscale": 1.0}},
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "deepseek-v32": ("deepseek_v32", {}),
    "glm-moe-dsa": ("glm_moe_dsa", {}),
    "gpt-oss": ("gpt_oss", {}),
    "minimax-m2": ("minimax_m2", {}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "gemma": ("gemma", {}),
    "seed-oss": ("seed_oss", {}),
    "exaone4": ("exaone4", {}),
    "ernie4-5": ("ernie4_5", {}),
    "glm": ("glm", {}),
    "helium": ("helium", {}),
    "dots1": ("dots1", {}),
    "exaone-moe": ("exaone_moe", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {}),
    "arcee": ("arcee", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "vaultgemma": ("vaultgemma", {}),
    "granitemoe": ("granitemoe", {}),
    "ernie4-5-moe": ("ernie4_5_moe", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "ministral": ("ministral", {}),
    "cwm": ("cwm", {}),
    "internlm3": ("internlm3", {}),
    "iquestcoder": ("iquestcoder", {}),
    "jais2": ("jais2", {}),
    "hyperclovax": ("hyperclovax", {}),
    "solar-open": ("solar_open", {}),
    "flex-olmo": ("flex_olmo", {}),
    "youtu": ("youtu", {}),
    "llama4": ("llama4_text", {}),
    "mistral4": ("mistral4", {}),
    "apertus": ("apertus", {}),
    "phi": ("phi", {}),
    "bamba": ("bamba", {}),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1-normed": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "attention_bias": True,
        },
    ),
    "falcon-h1-norm-first": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True},
    ),
    "nemotron-h-moe": ("nemotron_h", {}),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite4-moe": ("granitemoehybrid", {}),
    "granite4": (
        "granitemoehybrid",
        {"num_local_experts": 0, "mamba_n_groups": 2, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2-moe": ("lfm2_moe", {}),
    "olmo": ("olmo", {}),
    "phi-normed": ("phi", {"qk_layernorm": True, "num_key_value_heads": 8}),
    "phimoe": ("phimoe", {}),
    "olmo2-bias": ("olmo2", {"attention_bias": True, "num_key_value_heads": 2}),
}

#: Families that are others but for a few flags: of these, tests try less.
ALIKE = (
    "gemma", "seed-oss", "exaone4", "ernie4-5", "glm", "helium", "cohere", "arcee", "stablelm", "stablelm-parallel",
    "vaultgemma", "ministral", "cwm", "internlm3", "iquestcoder", "jais2", "hyperclovax", "youtu", "phi",
    "nemotron-h", "bamba",
)  # fmt: skip
ALIKE_WITH_EXPERTS = (
    "dots1", "exaone-moe", "granitemoe", "ernie4-5-moe", "hunyuan-moe", "solar-open", "flex-olmo", "mistral4",
)  # fmt: skip
EVERY_VARIANT = VARIANTS | FAMILY_VARIANTS


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers config of a tiny model; `overrides` replace single fields."""
    config_class, _ = CLASSES[family]
    return config_class(**(SIZES | OWN[family] | overrides))


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 transformers model in eval mode, the same on every call with the same arguments."""
    torch.manual_seed(seed)
    model = CLASSES[family][1](tiny_config(family, **overrides))
    fill_randomly(model, family, seed)
    return model.eval()


def fill_randomly(model: Any, family: str, seed: int) -> None:
    """Give a model of that family random weights."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", ".norm_f.weight")):
                around = 0.0 if family in _ADDED_TO_ONE and ".linear_attn." not in name else 1.0
                parameter.copy_(around + 0.3 * noise)
            elif name.endswith((".A_log", ".D")) and ".linear_attn." not in name:
                parameter.copy_(0.5 + 0.5 * noise)
            elif name.endswith((".bias", "_bias", ".sinks")):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))


def tiny_checkpoint(
    directory: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write such a model under `directory` (configs and safetensors); returns its path.

    `max_shard_size="50KB"` gives several files with an index.
    """
    path = directory / f"tiny-{family}"
    model = tiny_model(family, seed=seed, **overrides).to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def mxfp4_checkpoint(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A gpt-oss whose experts are in MXFP4 blocks, all codes and many scales, as the published ones have them."""
    path = tiny_checkpoint(directory, "gpt_oss", seed=seed, dtype=torch.bfloat16, **overrides)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = tensors.pop(name).shape
        size = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(119, 125, size, dtype=torch.uint8, generator=generator)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def tiny_variant(directory: Path, name: str, **options: Any) -> Path:
    """The checkpoint of one of EVERY_VARIANT."""
    family, overrides = EVERY_VARIANT[name]
    return tiny_checkpoint(directory, family, **(overrides | options))


def put_nan(path: Path, name: str) -> None:
    """Make one element of a checkpoint's tensor NaN."""
    file = path / "model.safetensors"
    weights = load_file(file)
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, file, {"format": "pt"})


def with_head(path: Path, change: float, rows: int | None = None) -> Path:
    """Put a head beside the tied embedding of a checkpoint: the embedding (its first `rows`), but for `change` added to
    the last element."""
    file = path / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()[:rows]
    head[-1, -1] += change  # the last bytes that are compared
    save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
    return path
