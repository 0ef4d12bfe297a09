"""What to do about a cause, and where engines had it: by the cause's name, else by its class.

Issues are "owner/repository#number" on GitHub, each of the very kind of bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to change, and public bugs of that kind."""

    fix: str = ""
    issues: tuple[str, ...] = ()


#: Remedies of whole classes of causes.
_OF_CLASS: Mapping[str, Remedy] = {
    "bias": Remedy(
        "compare the module's bias parameter on each rank with the checkpoint's, and where it is added",
        ("onnxruntime/mobius#396", "huggingface/text-generation-inference#1036"),
    ),
    "weight": Remedy(
        "compare the parameter's bytes on each rank with the checkpoint's tensor of that name: mapping of names, "
        "layout, and what was written after loading",
        ("vllm-project/vllm#44113",),
    ),
    "input": Remedy(
        "look at which tensor the module is called with: of this layer, after its norm, the same rows in the same "
        "order on every rank",
    ),
    "sharding": Remedy(
        "check from which rows or columns of the checkpoint's tensor each rank takes its shard: the rank passed to the "
        "loader, local against global sizes, the order of fused parts",
        ("vllm-project/vllm#36242", "ndif-team/nnsight#719"),
    ),
    "reduce": Remedy(
        "reduce the row-parallel output exactly once, into the tensor that is used afterwards; add bias and residual "
        "after it",
        ("NVIDIA/TensorRT-LLM#6850", "lightseekorg/tokenspeed#80", "mirage-project/mirage#722"),
    ),
    "norm": Remedy(
        "compare epsilon, the convention of the weight (w or 1 + w) and the axis of the mean with the model's own code",
        ("ggml-org/llama.cpp#2374", "linkedin/Liger-Kernel#74"),
    ),
    "rope": Remedy(
        "build the frequencies from the checkpoint's rope parameters, and rotate the pairs (i, i + D/2) of a head once",
        ("unslothai/unsloth#6197", "lablup/mlxcel#1355", "google/gemma.cpp#986"),
    ),
    "positions": Remedy(
        "derive each token's position from the length of the cache before this step, per sequence, once for all layers",
        ("Blaizzy/mlx-vlm#1983", "jundot/omlx#2363"),
    ),
    "scores": Remedy(
        "scores are q·k times the scale of the configuration and nothing else: attention_multiplier (Granite) or "
        "1/sqrt(query_pre_attn_scalar) (Gemma) where it has them, else 1/sqrt(head_dim)",
        ("mlc-ai/mlc-llm#3426",),
    ),
    "mask": Remedy(
        "a query at position p sees keys 0 … p of its own sequence (within the window: p - W + 1 … p), aligned to the "
        "bottom right when a cache precedes it; fill with -inf, do not multiply by it",
        ("pytorch/pytorch#108108", "huggingface/transformers#39408"),
    ),
    "heads": Remedy(
        "query head h reads KV head h // (heads / kv_heads), with the counts of one rank or of all, not a mix of both",
        ("onnx/onnx#7274",),
    ),
    "softmax": Remedy(
        "normalise each query's row over its keys, in float32", ("nerdai/llms-from-scratch-rs#30",)
    ),
    "cache": Remedy(
        "check slot mapping and length: each token's row is written once, at its own slot, in its own layer, and all "
        "rows of the sequence are read",
        ("ovg-project/kvcached#362",),
    ),
    "activation": Remedy("compute the configuration's hidden_act of gate, times up"),
    "residual": Remedy(
        "add the residual stream once to each block's reduced output, and keep the stream itself unnormalised",
        ("deepspeedai/DeepSpeed#2834",),
    ),
    "choice": Remedy(
        "choose num_experts_per_tok experts by the configuration's scores, with the correction bias and within the "
        "best groups where it has them"
    ),
    "choice_weights": Remedy(
        "weigh experts by their scores without the correction bias, renormalised where norm_topk_prob is true, times "
        "routed_scaling_factor once",
        ("vllm-project/vllm#45037", "vllm-project/vllm#43769"),
    ),
    "experts": Remedy(
        "send each row through the matrices of the expert that was chosen, on the rank that holds it, and no other's",
        ("vllm-project/vllm#31534",),
    ),
    "combine": Remedy(
        "add each expert's output once, times its weight, and the shared expert's once over all ranks, times its gate",
        ("vllm-project/vllm#37856", "vllm-project/vllm-ascend#6710"),
    ),
    "embedding": Remedy(
        "look each id up in the row of that number, on the rank that holds it; ids that a rank lacks give zero there"
    ),
    "head": Remedy(
        "load lm_head.weight, or tie it to the embedding exactly where the configuration ties it, with its bias",
        ("sgl-project/sglang#2009", "vllm-project/vllm#46835"),
    ),
    "precision": Remedy(
        "do this operation in float32, or in the dtype that the model's own code uses for it"
    ),
    "overflow": Remedy(
        "the values exceed this dtype's range: compute this operation in float32 or run the model in bfloat16",
        ("huggingface/transformers#33317", "QwenLM/Qwen3#910"),
    ),
    "sampling": Remedy(
        "choose the token on one rank from all of the vocabulary's logits, and send it to the others"
    ),
    "loading": Remedy(
        "decode the tensor's blocks as ggml defines the type, and undo llama.cpp's row order of q and k for llama",
        ("huggingface/transformers#31788", "vllm-project/vllm-metal#480"),
    ),
}

#: Remedies of single causes, where the class's states too little.
_OF_NAME: Mapping[str, Remedy] = {
    "bias_dropped": Remedy(
        "create the module with a bias and load it: the checkpoint has one", ("onnxruntime/mobius#396",)
    ),
    "bias_repeated": Remedy(
        "add the bias once: after the all-reduce, or on rank 0 alone",
        ("Wenyueh/MinivLLM#80", "huggingface/text-generation-inference#1036", "awslabs/slapo#10"),
    ),
    "bias_of_other_rank": Remedy("cut the bias like the rows of its weight: rank r takes part r"),
    "transposed": Remedy(
        "a Linear's weight is [out, in] in the checkpoint: transpose by the format, never by a comparison of shapes",
        ("vllm-project/vllm#44113",),
    ),
    "misread": _OF_CLASS["loading"],
    "columns_moved": Remedy(
        "split the fused tensor by its parts first, then cut each part for the ranks",
        ("vllm-project/vllm#36242", "ndif-team/nnsight#719"),
    ),
    "sharded_on_in_features": Remedy(
        "cut q, k, v, gate and up along out_features (dim 0 of the weight), o and down along in_features"
    ),
    "not_reduced": Remedy(
        "all-reduce the row-parallel output, and use the tensor that the collective wrote",
        ("NVIDIA/TensorRT-LLM#6850",),
    ),
    "residual_in_sum": Remedy(
        "add the residual after the all-reduce, or on rank 0 alone",
        ("deepspeedai/DeepSpeed#2834", "mirage-project/mirage#722"),
    ),
    "mask_zero_times_inf": Remedy(
        "fill with -inf where masked (masked_fill, where) instead of multiplying the mask by -inf: 0 * -inf is NaN"
    ),
    "cache_not_used": Remedy("pass the cached keys and values to attention, not this step's alone"),
    "fused_attention": Remedy(
        "compare the fused kernel's arguments (scale, causal alignment, window, head groups) with the explicit path",
        ("pytorch/pytorch#108108", "mlc-ai/mlc-llm#3426"),
    ),
}


def remedy_of(name: str, kind: str) -> Remedy:
    """What is known of the cause `name` of class `kind`."""
    return _OF_NAME.get(name) or _OF_CLASS.get(kind) or Remedy()
