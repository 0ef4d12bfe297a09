"""A Hugging Face checkpoint as a GGUF file, as llama.cpp's converter makes it, through gguf-py: names by its own
table, q and k of `llama` and its kin permuted by the converter's formula, Gemma's norms with 1 added. Nothing here
comes from the engine.

    path = gguf_twin(tiny_variant(tmp_path, "llama-llama3"), tmp_path / "twin.gguf", "Q8_0")
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.checkpoints import FAMILY_VARIANTS, LATENT_YARN
from tests.gguf_experts import expert_keys, unstacked
from tests.gguf_linear import as_linear, linear_keys
from tests.gguf_mamba import as_mamba, mamba_keys

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "phi": gguf.MODEL_ARCH.PHI2,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "apertus": gguf.MODEL_ARCH.APERTUS,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "jais2": gguf.MODEL_ARCH.JAIS2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "youtu": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
#: Whose q and k are permuted.
PAIRED = (
    gguf.MODEL_ARCH.LLAMA,
    gguf.MODEL_ARCH.GRANITE,
    gguf.MODEL_ARCH.SMOLLM3,
    gguf.MODEL_ARCH.ARCEE,
    gguf.MODEL_ARCH.OLMO,
    gguf.MODEL_ARCH.MISTRAL3,
    gguf.MODEL_ARCH.GRANITE_MOE,
    gguf.MODEL_ARCH.GRANITE_HYBRID,
    gguf.MODEL_ARCH.NEMOTRON_H,
    gguf.MODEL_ARCH.NEMOTRON_H_MOE,
)
LINEAR = (gguf.MODEL_ARCH.QWEN3NEXT, gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
#: Whose norms are stored with 1 added.
GEMMA = (
    gguf.MODEL_ARCH.GEMMA, gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3, gguf.MODEL_ARCH.NEMOTRON,
)  # fmt: skip
#: What llama.cpp's program has of Llama 4, whatever the model.
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0],
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
PHIMOE_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "factor": 32.0, "rope_theta": 1e4, "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 5.0, 9.0],
    "short_mscale": math.sqrt(1 + math.log(32) / math.log(8)), "long_mscale": math.sqrt(1 + math.log(32) / math.log(8)),
}  # fmt: skip
#: name -> (family, overrides) of models that llama.cpp's programs and keys can state: Gemma's scores are scaled by a
#: head's width, and windows of all layers but each so many-th, as few as a tiny model has.
CONVERTIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma2-uncapped": ("gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
                                   "final_logit_softcapping": 30.0, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None}),
    "gemma3-capped": ("gemma3_text", {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None,
                                      "final_logit_softcapping": 3.0}),
    "gemma4": ("gemma4_text", {}),
    "gemma4-dense": FAMILY_VARIANTS["gemma4-dense"],
    "gemma4-moe": FAMILY_VARIANTS["gemma4-moe"],
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}),
    "phi3-longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}}),
    "granite": ("granite", {}),
    "granite-bias": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite-moe": ("granitemoe", {}),
    "granite4": ("granitemoehybrid", {"num_local_experts": 0, "intermediate_size": 48, "mamba_n_groups": 2,
                                      "tie_word_embeddings": True}),
    "granite4-moe": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "nemotron-h": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
                                  "mlp_bias": True, "time_step_min": 1e-30}),
    "nemotron-h-moe": ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                                      "intermediate_size": 32, "time_step_min": 1e-30, "n_group": 1,
                                      "topk_group": 1}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "glm4": ("glm4", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gemma": ("gemma", {}),
    "seed-oss": ("seed_oss", {}),
    "exaone4": ("exaone4", {}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4-5": ("ernie4_5", {}),
    "arcee": ("arcee", {}),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "layer_types": None}),
    "olmo": ("olmo", {}),
    "olmo-unclipped": ("olmo", {"clip_qkv": None}),
    "lfm2": ("lfm2", {}),
    "lfm2-moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),
    "phi": ("phi", {}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3_moe", {"mlp_only_layers": []}),
    "qwen2-moe": ("qwen2_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "glm4-moe": ("glm4_moe", {}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "minimax-m2": ("minimax_m2", {}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": {**LATENT_YARN, "mscale": 1.0}}),
    "llama4": ("llama4_text", LLAMA4),
    "llama4-128-experts": ("llama4_text", {**LLAMA4, "num_local_experts": 128, "use_qk_norm": False,
                                           "num_experts_per_tok": 1, "interleave_moe_layer_step": 4,
                                           "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "phimoe": ("phimoe", {"router_jitter_noise": 0.01, "rope_parameters": PHIMOE_ROPE}),
    "mistral4": ("mistral4", {"first_k_dense_replace": 0, "rope_parameters": {
        **LATENT_YARN, "mscale": 1.0, "llama_4_scaling_beta": 0.1}}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "ernie4-5-moe": ("ernie4_5_moe", {"tie_word_embeddings": False}),
    "exaone-moe": ("exaone_moe", {}),
    "apertus": ("apertus", {}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "jais2": ("jais2", {}),
    "ministral3": ("ministral3", {}),
    "youtu": ("youtu", {"attention_bias": False}),
    "qwen3-next": ("qwen3_next", {"mlp_only_layers": []}),
    "qwen3.5": ("qwen3_5_text", {"linear_num_key_heads": 2}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
}  # fmt: skip


def gguf_twin(
    checkpoint: Path,
    path: Path,
    kind: str = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    split_tensors: int = 0,
    split_expansion: bool = True,
    further: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the twin: matrices of type `kind`, vectors F32. `keys` are further metadata (lists, str, int, bool);
    `split_tensors` is how many tensors a file has at most (then `path` is the name without its number);
    `split_expansion`: whether latent attention's keys and values have a tensor each, as in newer files, and z of
    Qwen3-Next's linear attention; `further`
    are tensors that the checkpoint does not have."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    if (kinds := config.get("layers_block_type")) is not None:  # Nemotron-H's
        config["num_hidden_layers"] = len(kinds)
        if "moe" not in kinds:
            config["n_routed_experts"], architecture = 0, gguf.MODEL_ARCH.NEMOTRON_H
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=split_tensors)
    if f"{writer.arch}.block_count" not in (keys or {}):
        writer.add_block_count(config["num_hidden_layers"])
    _hyperparameters(writer, config)
    for key, value in (keys or {}).items():
        _add(writer, key, value)
    for name, factors in _rope_factors(config).items():
        writer.add_tensor(name, factors)
    for name, array in (further or {}).items():
        writer.add_tensor(name, array)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = load_file(checkpoint / "model.safetensors")
    scalars = [name for name in tensors if name.endswith("layer_scalar")]
    tensors |= {f"{name}.weight": tensors.pop(name) for name in scalars}
    tensors = unstacked(tensors, config, split_expansion)
    for number in ("alpha_p", "alpha_n", "beta", "eps"):
        if each := [
            tensors.pop(name).item() for name in sorted(tensors) if name.endswith(f"act_fn.{number}")
        ]:
            writer.add_array(f"xielu.{number}", each)
    for name, tensor in (
        as_linear(tensors, config, split_expansion) if architecture in LINEAR else as_mamba(tensors, config)
    ).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert target is not None, name
        if architecture in PAIRED and ".q_proj." in name:
            tensor = _permuted(tensor, config["num_attention_heads"])
        if architecture in PAIRED and ".k_proj." in name:
            tensor = _permuted(tensor, config["num_key_value_heads"])
        if architecture in (*GEMMA, *LINEAR) and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        if name.endswith("conv.conv.weight"):
            tensor = tensor.squeeze(1)
        array = tensor.float().contiguous().numpy()
        plain = (
            array.ndim == 1
            or target.endswith(".bias")
            or ".ffn_gate_inp" in target
            or ".shortconv.conv" in target
        )
        # The converter stores what does not divide into blocks as F16; here it stays what it is.
        whole = array.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
        stored = gguf.GGMLQuantizationType["F32" if plain or not whole else kind]
        writer.add_tensor(target, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_keys(checkpoint: Path, pre: str = "qwen2") -> dict[str, Any]:
    """The byte-level BPE tokenizer of a checkpoint as GGUF metadata: what the converter writes."""
    if (checkpoint / "tokenizer.json").is_file():
        described = json.loads((checkpoint / "tokenizer.json").read_text())
        ids, merges = described["model"]["vocab"], described["model"]["merges"]
        added = {token["id"]: token for token in described["added_tokens"]}
    else:
        ids = json.loads((checkpoint / "vocab.json").read_text())
        merges = [line.split(" ") for line in (checkpoint / "merges.txt").read_text().splitlines()[1:]]
        settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
        added = {int(number): token for number, token in settings["added_tokens_decoder"].items()}
    texts = {number: text for text, number in ids.items()} | {
        n: token["content"] for n, token in added.items()
    }
    kinds = {n: 3 if token["special"] else 4 for n, token in added.items()}
    size = max(texts) + 1
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    named = {text: number for number, text in texts.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(n, f"[PAD{n}]") for n in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(n, 1 if n in texts else 5) for n in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": named[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }


def write_keys(path: Path, keys: Mapping[str, Any], architecture: str = "qwen2") -> Path:
    """A GGUF file of metadata alone."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _hyperparameters(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    family, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if family != "nemotron_h":
        writer.add_feed_forward_length(_feed_forward(config))
    writer.add_head_count(heads)
    if "ssm_state_size" in config or "mamba_d_state" in config:
        mamba_keys(writer, config)
    elif "conv_L_cache" in config:
        kinds = config["layer_types"]
        writer.add_head_count_kv([0 if kind == "conv" else config["num_key_value_heads"] for kind in kinds])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif "kv_lora_rank" not in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if (
        family not in ("phi3", "phimoe", "granite", "granitemoe", "granitemoehybrid")
        and "kv_lora_rank" not in config
    ):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "conv_L_cache" in config:
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    elif found := [
        key for key in ("norm_epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon") if key in config
    ]:
        writer.add_layer_norm_eps(config[found[0]])
    elif family == "olmo":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "rope_parameters" in config:
        _rotation(writer, config, head_dim)
    _of_its_own(writer, config)
    expert_keys(writer, config)
    if "linear_num_key_heads" in config:
        linear_keys(writer, config)


def _feed_forward(config: dict[str, Any]) -> int:
    """That of dense layers; of LFM2 what the converter makes of its config."""
    width: int = config.get("intermediate_size_mlp", config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    multiple = config["block_multiple_of"]
    width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
    return multiple * ((width + multiple - 1) // multiple)


def _rotation(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    by_type = config["rope_parameters"]
    rope = by_type.get("full_attention", by_type)
    if config["model_type"] != "gemma2":
        stretch = rope["alpha"] ** (head_dim / (head_dim - 2)) if "alpha" in rope else 1.0
        writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    if "sliding_attention" in by_type:
        writer.add_rope_freq_base_swa(by_type["sliding_attention"]["rope_theta"])
    if "kv_lora_rank" not in config:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] in ("phi3", "phimoe"):
        original = (config | rope)["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _of_its_own(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the converter's class of the family writes."""
    family = config["model_type"]
    windowed = (
        "gemma4_text",
        "mistral",
        "gemma2",
        "gemma3_text",
        "olmo3",
        "exaone4",
        "exaone_moe",
        "cohere2",
    )
    if family in windowed and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if family in ("phi3", "phimoe"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if family in ("olmo3", "exaone4", "exaone_moe", "gemma4_text"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if family == "ministral3":
        rope = config["rope_parameters"]
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if family == "gemma4_text":
        _gemma4(writer, config)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if family in ("gemma2", "gemma3_text", "gemma4_text") and config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family in ("granite", "granitemoe", "granitemoehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    shared, layers = config["num_kv_shared_layers"], config["num_hidden_layers"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    for wide, size in (("", _of_full(config, "head_dim")), ("_swa", config["head_dim"])):
        for what in ("key_length", "value_length"):
            getattr(writer, f"add_{what}{wide}")(size)
        getattr(writer, f"add_rope_dimension_count{wide}")(size)
    if config["use_double_wide_mlp"]:
        width = config["intermediate_size"]
        writer.add_feed_forward_length([width if i < layers - shared else 2 * width for i in range(layers)])
    own, full = config["num_key_value_heads"], _of_full(config, "num_key_value_heads")
    if full != own:
        writer.add_head_count_kv(
            [own if kind == "sliding_attention" else full for kind in config["layer_types"]]
        )


def _of_full(config: dict[str, Any], key: str) -> int:
    """Of Gemma-4's layers that see everything, as transformers writes it."""
    full = config["layer_types"].index("full_attention")
    found: int = config.get("per_layer_config", {}).get(str(full), {}).get(key, config[key])
    return found


def _rope_factors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors that the converter makes of Llama 3.1's scaling, and of LongRoPE."""
    if "rope_parameters" not in config:
        return {}
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    if rope["rope_type"] == "proportional":
        pairs = _of_full(config, "head_dim") // 2
        turning = int(pairs * rope["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (pairs - turning), dtype=np.float32)}
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32)
            for kind in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    context, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, dtype=np.float32)}


def _permuted(weights: torch.Tensor, heads: int) -> torch.Tensor:
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
