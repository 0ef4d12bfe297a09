"""Mixtures of experts and latent attention as the metadata of GGUF files has them, and what llama.cpp's programs
(`src/models`) have in them alone. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from lockstep.engine.checkpoint.gguf.stated_sizes import Own, StatedSizes
from lockstep.engine.checkpoint.gguf.windows import WINDOW, rotated_by_windows, windows
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import ClampedSwiGLU
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.latent import LatentConfig
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.engine.errors import ConfigError

EXPERT_KEYS = ("expert_count", "expert_used_count")
YARN_KEY = "rope.scaling.yarn_log_multiplier"
#: How much queries grow with their position.
TEMPERATURE = "attention.temperature_scale"
_GATING, _NORM, _SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
_WIDTH = "expert_feed_forward_length"
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
_LLAMA4_CHUNK = 8192


def mixtral(fields: Fields, of: StatedSizes) -> Own:
    """Llama's file with experts."""
    return {"family": "mixtral", "experts": replace(softmax_experts(fields, of, True), wide_weights=True)}


def qwen3_moe(fields: Fields, of: StatedSizes) -> Own:
    """llama.cpp renormalises always."""
    return {"qk_norm": True, "experts": softmax_experts(fields, of, True)}


def qwen2_moe(fields: Fields, of: StatedSizes) -> Own:
    """llama.cpp never renormalises."""
    return {"experts": gated_shared(fields, of, False)}


def gated_shared(fields: Fields, of: StatedSizes, renormalised: bool) -> ExpertsConfig:
    """Scores are a softmax over all experts; one to which every token goes, through a gate."""
    own = "expert_shared_feed_forward_length"
    width = fields.size(own if own in fields else "feed_forward_length")
    return replace(softmax_experts(fields, of, renormalised), shared_width=width, shared_gated=True)


def olmoe(fields: Fields, of: StatedSizes) -> Own:
    """Norms over all heads of q and k."""
    return {"qk_norm": True, "qk_norm_whole": True, "experts": softmax_experts(fields, of, False)}


def glm4_moe(fields: Fields, of: StatedSizes) -> Own:
    """DeepSeek-V3's routing; norms of q and k in the larger models."""
    experts = _with_shared(fields, sigmoids(fields, of, fields.flag(_NORM, False)))
    return {"qk_norm": "blk.0.attn_q_norm.weight" in of.tensors, "experts": replace(experts, wide=True)}


def minimax_m2(fields: Fields, of: StatedSizes) -> Own:
    """Norms over all heads of q and k; weights are renormalised always."""
    return {"qk_norm": True, "qk_norm_whole": True, "experts": sigmoids(fields, of, True)}


def gpt_oss(fields: Fields, of: StatedSizes) -> Own:
    """The activation's numbers are the program's. The ramp of YaRN's frequencies is not rounded to whole channels, as
    in the original; llama.cpp rounds."""
    experts = _experts(fields, of, gating=(0, _SOFTMAX_OF_CHOSEN), renormalised=True)
    exact = replace(of.rope.scaling, truncate=False)
    return {
        "norm": "wide",
        "sinks": True,
        "clamp": ClampedSwiGLU(7.0, 1.702),
        "windows": windows(fields, of.layers, fields.size(WINDOW, 128), 2),
        "rope_scaling": exact,
        "experts": replace(experts, biased=True),
    }


def deepseek2(fields: Fields, of: StatedSizes) -> Own:
    """DeepSeek-V2 where scores are a softmax, else V3, whose architecture GLM-4.7-Flash has too, and Youtu without
    experts. Of V2 the best expert of each group counts, as in the original; llama.cpp adds the two best."""
    if TEMPERATURE in fields:  # Mistral-Large-3
        return mistral4(fields, of)
    if not fields.size("expert_count", 0, least=0):
        return {**_latent(fields, of), "family": "youtu"}
    sigmoid = fields.size(_GATING, _SOFTMAX, least=0) == _SIGMOID
    if sigmoid:
        experts = sigmoids(fields, of, fields.flag(_NORM, False))
    else:
        if fields.flag(_NORM, False):
            lost = "" if _GATING in fields else f"; a V3 has {_GATING} = {_SIGMOID}, which this file lacks"
            raise fields.error(_NORM, f"DeepSeek-V2, whose scores are a softmax, does not renormalise{lost}")
        experts = replace(_experts(fields, of, gating=(0, _SOFTMAX), renormalised=False), group_best=1)
    grouped = replace(_grouped(fields, experts), wide=True, wide_weights=True)
    family = "deepseek_v3" if sigmoid else "deepseek_v2"
    return {**_latent(fields, of), "family": family, "experts": _with_shared(fields, grouped)}


def llama4(fields: Fields, of: StatedSizes) -> Own:
    """How long chunks are, which layers do not rotate, and how these scale their queries is in the program. The larger
    model, known by its 128 experts, has no norms of q and k."""
    if not fields.size(WINDOW, _LLAMA4_CHUNK, least=0):
        raise fields.error(WINDOW, "a Llama 4 without chunks of attention is not supported")
    if fields.number(_SCALE, 0.0) not in (0.0, 1.0):
        raise fields.error(_SCALE, "not supported for this architecture")
    experts = _experts(fields, of, gating=(0, _SIGMOID), renormalised=False, scores="sigmoid")
    return {
        "neighbours": True,
        "unit_qk_norm": experts.count != 128,
        "chunked": True,
        "windows": windows(fields, of.layers, _LLAMA4_CHUNK, 4),
        "layer_ropes": tuple(None if (i + 1) % 4 == 0 else of.rope for i in range(of.layers)),
        "query_scaling": QueryScaling(0.1, _LLAMA4_CHUNK, offset=1, unrotated_alone=True),
        "experts": replace(experts, shared_width=experts.width, weighed_inputs=True),
    }


def phimoe(fields: Fields, of: StatedSizes) -> Own:
    """Experts are weighed by SparseMixer, as in the original; llama.cpp takes a softmax. Long contexts have the short
    factors of LongRoPE too."""
    experts = replace(
        _experts(fields, of, gating=(0, _SOFTMAX), renormalised=False), scores="logits", jitter=0.01
    )
    if experts.top_k != 2:
        raise fields.error("expert_used_count", "SparseMixer chooses two experts")
    scaling = of.rope.scaling
    window = fields.size(WINDOW, 0, least=0)
    notes = ["experts are weighed by SparseMixer (router_jitter_noise = 0.01), as in the original model"]
    if scaling.kind == "longrope":
        notes.append(
            f"rotated channels are multiplied by {scaling.attention_factor:.6g}, as in the file; the original "
            "model's short_mscale is not in it"
        )
    return {
        "norm": "layer",
        "head_bias": "output.bias" in of.tensors,
        "windows": (window or None,) * of.layers,
        "rope_scaling": replace(scaling, long_factors=scaling.factors),
        "experts": experts,
        "notes": tuple(notes),
    }


def mistral4(fields: Fields, of: StatedSizes) -> Own:
    """DeepSeek's attention with scaled queries: by a tenth where the file does not state it, as in the published model,
    which llama.cpp leaves out then."""
    experts = _experts(fields, of, gating=(0, _SOFTMAX), renormalised=fields.flag(_NORM, False))
    latent = _latent(fields, of)
    scaling = latent["rope_scaling"]
    length = fields.size("attention.temperature_length", scaling.original_max_position or of.max_position)
    beta, notes = 0.1, tuple[str, ...]()
    if TEMPERATURE in fields:
        beta = fields.number(TEMPERATURE)
    else:
        notes = (f"{TEMPERATURE} is missing: {beta:g}, as in the published model; llama.cpp takes 0",)
    return {
        **latent,
        "family": "mistral4",
        "query_scaling": QueryScaling(beta, length) if beta else None,
        "experts": _with_shared(fields, _grouped(fields, experts)),
        "notes": notes,
    }


def hunyuan_moe(fields: Fields, of: StatedSizes) -> Own:
    """Norms of q and k behind the rotation; llama.cpp renormalises always."""
    experts = replace(softmax_experts(fields, of, True), wide=True, wide_weights=True)
    width = fields.size("expert_shared_feed_forward_length", fields.size("feed_forward_length"))
    return {"rotated_qk_norm": True, "experts": replace(experts, shared_width=width)}


def ernie4_5_moe(fields: Fields, of: StatedSizes) -> Own:
    """Scores are a softmax, of which a bias corrects the choice; llama.cpp renormalises always."""
    experts = replace(softmax_experts(fields, of, True), correction=_corrected(of), wide=True)
    return {"neighbours": True, "experts": _with_shared(fields, experts)}


def exaone_moe(fields: Fields, of: StatedSizes) -> Own:
    """DeepSeek-V3's routing; layers without a window do not rotate."""
    experts = _with_shared(fields, sigmoids(fields, of, fields.flag(_NORM, False)))
    own = windows(fields, of.layers, fields.size(WINDOW, 128), 4)
    return {
        "qk_norm": True,
        "windows": own,
        "layer_ropes": rotated_by_windows(of, own),
        "experts": replace(experts, wide=True),
    }


def latent_of_gguf(fields: Fields, tensors: Mapping[str, object]) -> LatentConfig:
    """Widths of heads are of `_mla` keys where those without speak of the absorbed form, which has one head of keys."""
    absorbed = "attention.key_length_mla" in fields
    key, value = (f"attention.{one}_length" + ("_mla" if absorbed else "") for one in ("key", "value"))
    rope, size = fields.size("rope.dimension_count"), fields.size(key)
    if rope % 2 or rope >= size:
        raise fields.error("rope.dimension_count", f"expected an even number below {key} = {size}")
    q_rank = fields.size("attention.q_lora_rank", 0, least=0) or None
    return LatentConfig(
        fields.size("attention.kv_lora_rank"),
        size - rope,
        rope,
        fields.size(value),
        q_rank,
        "blk.0.attn_kv_a_mqa.bias" in tensors,
    )


def _latent(fields: Fields, of: StatedSizes) -> Own:
    """What all latent attention has: neighbours turn, at the end of each head."""
    return {"neighbours": True, "rotary_last": True, "rope_scaling": _latent_yarn(fields, of)}


def _latent_yarn(fields: Fields, of: StatedSizes) -> RopeScaling:
    """The rotation has no factor of its own (mscale = mscale_all_dim, all that llama.cpp knows), the scores have."""
    scaling = of.rope.scaling
    if scaling.kind != "yarn":
        return scaling
    weight = fields.number(YARN_KEY, above=0.0) / 0.1  # the converter writes a tenth of it
    return replace(scaling, attention_factor=None, mscale=weight, mscale_all_dim=weight)


def softmax_experts(fields: Fields, of: StatedSizes, renormalised: bool) -> ExpertsConfig:
    """Scores are a softmax over all experts."""
    _refuse_other(fields, _NORM, renormalised)
    if fields.number(_SCALE, 0.0) not in (0.0, 1.0):
        raise fields.error(_SCALE, "not supported for this architecture")
    return _experts(fields, of, gating=(0, _SOFTMAX), renormalised=renormalised)


def sigmoids(fields: Fields, of: StatedSizes, renormalised: bool) -> ExpertsConfig:
    """Scores are sigmoids, of which a bias corrects the choice."""
    experts = _experts(fields, of, gating=(0, _SIGMOID), renormalised=renormalised, scores="sigmoid")
    return replace(_grouped(fields, experts), correction=_corrected(of), wide_weights=True)


def _corrected(of: StatedSizes) -> bool:
    """Whether there is a bias of the choice."""
    return any(name.endswith(".exp_probs_b.bias") for name in of.tensors)


def _grouped(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """In groups, and with the factor of their weights."""
    return replace(
        experts,
        groups=fields.size("expert_group_count", 1),
        top_groups=fields.size("expert_group_used_count", 1),
        factor=fields.number(_SCALE, 0.0) or 1.0,
    )


def _with_shared(fields: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    """So many shared experts are one, of their width together."""
    return replace(experts, shared_width=experts.width * fields.size("expert_shared_count", 0, least=0))


def _experts(
    fields: Fields,
    of: StatedSizes,
    *,
    gating: tuple[int, int],
    renormalised: bool,
    scores: Literal["softmax", "sigmoid"] = "softmax",
) -> ExpertsConfig:
    """Layers have experts where the file has a router for them. `gating`: the values of its key that mean this."""
    if fields.size(_GATING, gating[0], least=0) not in gating:
        raise fields.error(_GATING, "not a choice of experts that this architecture is known with")
    layers = tuple(f"blk.{i}.ffn_gate_inp.weight" in of.tensors for i in range(of.layers))
    if not any(layers):
        raise ConfigError(f"{fields.where}: no layer has a router (ffn_gate_inp.weight)")
    return ExpertsConfig(
        fields.size("expert_count"),
        fields.size("expert_used_count"),
        fields.size(_WIDTH if _WIDTH in fields else "feed_forward_length"),
        layers,
        scores=scores,
        renormalised=renormalised,
    )


def _refuse_other(fields: Fields, key: str, value: bool) -> None:
    if fields.flag(key, value) != value:
        raise fields.error(key, "llama.cpp does not read it of this architecture")
