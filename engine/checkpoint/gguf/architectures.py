"""What each GGUF architecture's models do differently from llama's, as llama.cpp has it in `src/models`: keys, and
what is in the program alone. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.engine.checkpoint.gguf.convolution_architectures import (
    CONVOLUTION_EXPERT_KEYS,
    CONVOLUTION_KEYS,
    lfm2,
    lfm2_moe,
)
from lockstep.engine.checkpoint.gguf.expert_architectures import (
    EXPERT_KEYS,
    TEMPERATURE,
    YARN_KEY,
    deepseek2,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    gpt_oss,
    hunyuan_moe,
    llama4,
    minimax_m2,
    mistral4,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_moe,
)
from lockstep.engine.checkpoint.gguf.gemma4 import GEMMA4_KEYS, gemma4
from lockstep.engine.checkpoint.gguf.linear_architectures import LINEAR_KEYS, qwen3_5, qwen3_5_moe
from lockstep.engine.checkpoint.gguf.mamba_architectures import (
    GRANITE_KEYS,
    MULTIPLIERS,
    NEMOTRON_KEYS,
    falcon_h1,
    granite_hybrid,
    granite_moe,
    multipliers,
    nemotron_h,
)
from lockstep.engine.checkpoint.gguf.stated_sizes import Own, StatedSizes
from lockstep.engine.checkpoint.gguf.windows import PATTERN, WINDOW, rotated_by_windows, windows
from lockstep.engine.config import Family
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.config.rope_scaling import Rope, RopeScaling

_ATTENTION_CAP, _LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"


def _llama(fields: Fields, of: StatedSizes) -> Own:
    """Mistral's files state `llama`, and have a window in all layers; Mixtral's, and have experts."""
    if fields.size("expert_count", 0, least=0):
        return mixtral(fields, of)
    window = fields.size(WINDOW, 0, least=0)
    if window == 0 or window >= of.max_position:
        return {}
    return {"family": "mistral", "windows": (window,) * of.layers}


def _qwen2(fields: Fields, of: StatedSizes) -> Own:
    if 0 < fields.size(WINDOW, 0, least=0) < of.max_position:
        raise fields.error(WINDOW, "not supported for this architecture")
    return {}


def _qwen3(fields: Fields, of: StatedSizes) -> Own:
    return {**_qwen2(fields, of), "qk_norm": True}


def _gemma(fields: Fields, of: StatedSizes, largest: int, cap: float) -> Own:
    """`largest`: the layers of the largest model, whose scores are scaled by the width that all heads together would
    leave to each."""
    width = of.hidden // of.heads if of.layers == largest else of.head_dim
    return {
        "norm": "plus_one",
        "post_norms": True,
        "activation": "gelu_tanh",
        "score_scale": width**-0.5,
        "logit_cap": fields.number(_LOGIT_CAP, cap),
        "embedding_multiplier": of.hidden**0.5,
    }


def _gemma2(fields: Fields, of: StatedSizes) -> Own:
    return {
        **_gemma(fields, of, 46, 30.0),
        "score_cap": fields.number(_ATTENTION_CAP, 50.0),
        "windows": windows(fields, of.layers, fields.size(WINDOW, 4096), 2),
    }


def _gemma3(fields: Fields, of: StatedSizes) -> Own:
    """Layers with a window have a rotation of their own."""
    own = windows(fields, of.layers, fields.size(WINDOW, 0, least=0), 6)
    local = Rope(fields.number("rope.freq_base_swa", 10_000.0, above=0.0), RopeScaling())
    return {
        **_gemma(fields, of, 62, 0.0),
        "qk_norm": True,
        "windows": own,
        "layer_ropes": _ropes(of, own, local),
    }


def _olmo2(fields: Fields, of: StatedSizes) -> Own:
    """OLMo-3's files state `olmo2`: with windows, in whose layers nothing is scaled."""
    norms = {"norm": "wide", "pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True}
    window = fields.size(WINDOW, 0, least=0)
    if not window:
        return norms
    own = windows(fields, of.layers, window, 4)
    ropes = _ropes(of, own, Rope(of.rope.theta, RopeScaling()))
    return {**norms, "family": "olmo3", "windows": own, "layer_ropes": ropes}


def _phi3(fields: Fields, of: StatedSizes) -> Own:
    window = fields.size(WINDOW, 0, least=0)
    if not window:
        return {}
    note = f"{WINDOW} = {window} is applied in all layers, as in the original model; llama.cpp passes over it"
    return {"windows": (window,) * of.layers, "notes": (note,)}


def _granite(fields: Fields, of: StatedSizes) -> Own:
    return multipliers(fields)


def _smollm3(fields: Fields, of: StatedSizes) -> Own:
    """Every fourth layer does not rotate."""
    return {"layer_ropes": tuple(None if (i + 1) % 4 == 0 else of.rope for i in range(of.layers))}


def _glm4(fields: Fields, of: StatedSizes) -> Own:
    return {"post_norms": True, "neighbours": True}


def _starcoder2(fields: Fields, of: StatedSizes) -> Own:
    return {"norm": "layer", "gated": False, "activation": "gelu_tanh"}


def _gemma1(fields: Fields, of: StatedSizes) -> Own:
    return {"norm": "plus_one", "activation": "gelu_tanh", "embedding_multiplier": of.hidden**0.5}


def _exaone4(fields: Fields, of: StatedSizes) -> Own:
    """Where there are windows, layers without one do not rotate. llama.cpp knows the 32B model, which has them, by its
    number of layers."""
    own = windows(fields, of.layers, fields.size(WINDOW, 4096 if of.layers == 64 else 0, least=0), 4)
    norms = {"pre_norms": False, "post_norms": True, "qk_norm": True}
    return {**norms, "windows": own, "layer_ropes": rotated_by_windows(of, own) if any(own) else ()}


def _ernie4_5(fields: Fields, of: StatedSizes) -> Own:
    return {"neighbours": True}


def _arcee(fields: Fields, of: StatedSizes) -> Own:
    return {"gated": False, "activation": "relu2"}


def _nemotron(fields: Fields, of: StatedSizes) -> Own:
    return {"norm": "layer_plus_one", "gated": False, "activation": "relu2"}


def _stablelm(fields: Fields, of: StatedSizes) -> Own:
    """Side by side where the MLP has no norm, whatever the key states."""
    return {"norm": "layer", "parallel": "blk.0.ffn_norm.weight" not in of.tensors}


def _cohere(fields: Fields, of: StatedSizes) -> Own:
    scale = fields.number("logit_scale", above=0.0)
    return {"norm": "centred", "parallel": True, "neighbours": True, "logit_divisor": 1 / scale}


def _cohere2(fields: Fields, of: StatedSizes) -> Own:
    own = windows(fields, of.layers, fields.size(WINDOW), 4)
    return {**_cohere(fields, of), "windows": own, "layer_ropes": rotated_by_windows(of, own)}


def _olmo(fields: Fields, of: StatedSizes) -> Own:
    return {"norm": "bare", "clip_qkv": fields.number("attention.clamp_kqv", 0.0) or None}


def _phi2(fields: Fields, of: StatedSizes) -> Own:
    norms = {"norm": "layer", "parallel": True}
    return {**norms, "gated": False, "activation": "gelu_tanh", "head_bias": "output.bias" in of.tensors}


def _apertus(fields: Fields, of: StatedSizes) -> Own:
    """An MLP without a gate, whose activation is trained: its numbers are metadata (`stated_numbers`)."""
    return {"gated": False, "activation": "xielu", "qk_norm": True}


def _hunyuan(fields: Fields, of: StatedSizes) -> Own:
    """Norms of q and k behind the rotation. What stretched the base of its angles is in the file's base."""
    return {"rotated_qk_norm": True}


def _jais2(fields: Fields, of: StatedSizes) -> Own:
    return {"norm": "layer", "gated": False, "activation": "relu2"}


def _mistral3(fields: Fields, of: StatedSizes) -> Own:
    """Ministral-3: queries are scaled beyond the context that the rotation was stretched from. YaRN's factor on what is
    rotated is for `mscale` 1, which is all that llama.cpp knows."""
    scaling, weight = of.rope.scaling, fields.number(YARN_KEY, 0.0)
    if scaling.kind == "yarn" and weight:
        scaling = replace(scaling, attention_factor=None, mscale=1.0, mscale_all_dim=weight)
    beta = fields.number(TEMPERATURE, 0.0)
    length = scaling.original_max_position or of.max_position
    return {"rope_scaling": scaling, "query_scaling": QueryScaling(beta, length) if beta else None}


def _ropes(of: StatedSizes, own: tuple[int | None, ...], local: Rope) -> tuple[Rope, ...]:
    """Of each layer, `local` where it has a window; none where all are the same."""
    ropes = tuple(of.rope if window is None else local for window in own)
    return () if set(ropes) == {of.rope} else ropes


@dataclass(frozen=True, slots=True)
class Architecture:
    """`own(fields, sizes)`: what its models do differently. `knows` are keys that would otherwise be refused;
    `partial`: a part of each head may be rotated; `latent`: keys and values are made from latents."""

    family: Family
    own: Callable[[Fields, StatedSizes], Own]
    knows: tuple[str, ...] = ()
    eps_key: str = "attention.layer_norm_rms_epsilon"
    partial: bool = False
    latent: bool = False


#: By the names of GGUF files.
ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2": Architecture("qwen2", _qwen2),
    "qwen3": Architecture("qwen3", _qwen3),
    "llama": Architecture("llama", _llama, EXPERT_KEYS),
    "gemma2": Architecture("gemma2", _gemma2, (_ATTENTION_CAP, _LOGIT_CAP, PATTERN)),
    "gemma3": Architecture("gemma3_text", _gemma3, (_LOGIT_CAP, PATTERN)),
    "gemma4": Architecture("gemma4_text", gemma4, (_LOGIT_CAP, *GEMMA4_KEYS)),
    "olmo2": Architecture("olmo2", _olmo2, (PATTERN,)),
    "phi3": Architecture("phi3", _phi3, partial=True),
    "granite": Architecture("granite", _granite, MULTIPLIERS),
    "granitemoe": Architecture("granitemoe", granite_moe, (*MULTIPLIERS, *EXPERT_KEYS)),
    "granitehybrid": Architecture("granitemoehybrid", granite_hybrid, GRANITE_KEYS),
    "falcon-h1": Architecture("falcon_h1", falcon_h1),
    "nemotron_h": Architecture("nemotron_h", nemotron_h, NEMOTRON_KEYS, "attention.layer_norm_epsilon"),
    "nemotron_h_moe": Architecture("nemotron_h", nemotron_h, NEMOTRON_KEYS, "attention.layer_norm_epsilon"),
    "smollm3": Architecture("smollm3", _smollm3),
    "glm4": Architecture("glm4", _glm4, partial=True),
    "starcoder2": Architecture("starcoder2", _starcoder2, eps_key="attention.layer_norm_epsilon"),
    "gemma": Architecture("gemma", _gemma1),
    "seed_oss": Architecture("seed_oss", lambda fields, of: {}),
    "exaone4": Architecture("exaone4", _exaone4, (PATTERN,)),
    "ernie4_5": Architecture("ernie4_5", _ernie4_5),
    "arcee": Architecture("arcee", _arcee),
    "nemotron": Architecture("nemotron", _nemotron, eps_key="attention.layer_norm_epsilon", partial=True),
    "stablelm": Architecture(
        "stablelm", _stablelm, ("use_parallel_residual",), "attention.layer_norm_epsilon", partial=True
    ),
    "command-r": Architecture("cohere", _cohere, ("logit_scale",), "attention.layer_norm_epsilon"),
    "cohere2": Architecture("cohere2", _cohere2, ("logit_scale", PATTERN), "attention.layer_norm_epsilon"),
    "olmo": Architecture("olmo", _olmo, ("attention.clamp_kqv",), "attention.layer_norm_epsilon"),
    "lfm2": Architecture("lfm2", lfm2, CONVOLUTION_KEYS),
    "lfm2moe": Architecture("lfm2_moe", lfm2_moe, CONVOLUTION_EXPERT_KEYS),
    "phi2": Architecture("phi", _phi2, eps_key="attention.layer_norm_epsilon", partial=True),
    "qwen3moe": Architecture("qwen3_moe", qwen3_moe, EXPERT_KEYS),
    "qwen2moe": Architecture("qwen2_moe", qwen2_moe, EXPERT_KEYS),
    "olmoe": Architecture("olmoe", olmoe, EXPERT_KEYS),
    "glm4moe": Architecture("glm4_moe", glm4_moe, EXPERT_KEYS, partial=True),
    "minimax-m2": Architecture("minimax_m2", minimax_m2, EXPERT_KEYS, partial=True),
    "gpt-oss": Architecture("gpt_oss", gpt_oss, (*EXPERT_KEYS, PATTERN)),
    "deepseek2": Architecture("deepseek_v2", deepseek2, (*EXPERT_KEYS, YARN_KEY), latent=True),
    "llama4": Architecture("llama4_text", llama4, (*EXPERT_KEYS, PATTERN)),
    "phimoe": Architecture("phimoe", phimoe, EXPERT_KEYS),
    "mistral4": Architecture("mistral4", mistral4, (*EXPERT_KEYS, YARN_KEY), latent=True),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", hunyuan_moe, EXPERT_KEYS),
    "ernie4_5-moe": Architecture("ernie4_5_moe", ernie4_5_moe, EXPERT_KEYS),
    "exaone-moe": Architecture("exaone_moe", exaone_moe, (*EXPERT_KEYS, PATTERN)),
    "apertus": Architecture("apertus", _apertus),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _hunyuan),
    "jais2": Architecture("jais2", _jais2, eps_key="attention.layer_norm_epsilon"),
    "mistral3": Architecture("mistral", _mistral3, (YARN_KEY,)),
    "qwen3next": Architecture("qwen3_next", qwen3_5_moe, (*EXPERT_KEYS, *LINEAR_KEYS), partial=True),
    "qwen35": Architecture("qwen3_5_text", qwen3_5, LINEAR_KEYS, partial=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", qwen3_5_moe, (*EXPERT_KEYS, *LINEAR_KEYS), partial=True),
}
