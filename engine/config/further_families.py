"""Families that are others but for a few flags, and the rules of all. As in transformers 5, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.engine.config import families
from lockstep.engine.config.bamba import BAMBA
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.falcon_h1 import FALCON_H1
from lockstep.engine.config.families import Family, FamilyRules, Own
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.granite_hybrid import GRANITE_HYBRID
from lockstep.engine.config.latent import latent_of
from lockstep.engine.config.lfm2 import LFM2, LFM2_MOE
from lockstep.engine.config.llama4 import LLAMA4
from lockstep.engine.config.mistral4 import MISTRAL4
from lockstep.engine.config.nemotron_h import NEMOTRON_H
from lockstep.engine.config.phimoe import PHIMOE
from lockstep.engine.config.sparse_families import DEEPSEEK_V32, GLM_MOE_DSA


def _as(family: Family, fields: Fields) -> Own:
    """What that family's models do."""
    return families.RULES[family].own(fields)


def _experts_as(family: Family, fields: Fields) -> ExpertsConfig:
    """That family's experts."""
    experts = _as(family, fields)["experts"]
    assert isinstance(experts, ExpertsConfig)
    return experts


def _starcoder2(fields: Fields) -> Own:
    """LayerNorm, an MLP without a gate, biases everywhere (arXiv:2402.19173)."""
    bias = fields.flag("use_bias", True)
    return {"norm": "layer", "gated": False, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def _gemma(fields: Fields) -> Own:
    """Gemma 2 without its norms behind the blocks and its caps (arXiv:2403.08295). The GELU of old files is by a tanh,
    whatever they state."""
    without = {"post_norms": False, "score_scale": None, "score_cap": 0.0, "logit_cap": 0.0}
    return {**_as("gemma2", fields), **without, **_tanh_for(fields, "gelu")}


def _tanh_for(fields: Fields, name: str) -> Own:
    return {"activation": "gelu_tanh"} if fields.data.get("hidden_act") == name else {}


def _seed_oss(fields: Fields) -> Own:
    """Llama with biases of q, k and v, and of o by a key of its own."""
    return {
        "qkv_bias": fields.flag("attention_bias", True),
        "o_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _exaone4(fields: Fields) -> Own:
    """Norms behind the blocks alone, and of each head of q and k; layers that see everything do not rotate
    (arXiv:2507.11407)."""
    return {"pre_norms": False, "post_norms": True, "qk_norm": True}


def _ernie4_5(fields: Fields) -> Own:
    """Llama with neighbours rotated together."""
    bias = fields.flag("use_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "neighbours": True}


def _glm(fields: Fields) -> Own:
    """GLM-4 without the norms behind the blocks (arXiv:2406.12793)."""
    return {**_as("glm4", fields), "post_norms": False}


def _helium(fields: Fields) -> Own:
    """Llama with neighbours rotated together, and never a bias of o."""
    return {**_as("llama", fields), "o_bias": False, "norm": "wide", "neighbours": True}


def _dots1(fields: Fields) -> Own:
    """Qwen3 with DeepSeek-V3's routing (arXiv:2506.05767)."""
    experts = replace(
        _experts_as("glm4_moe", fields),
        top_k=fields.size("num_experts_per_tok"),
        layers=families.after_dense(fields, 0),
        renormalised=fields.flag("norm_topk_prob", False),
    )
    return {**_as("qwen3", fields), "experts": experts}


def _exaone_moe(fields: Fields) -> Own:
    """DeepSeek-V3's routing; layers that see everything do not rotate."""
    width = fields.size("moe_intermediate_size", 1024)
    experts = ExpertsConfig(
        fields.size("num_experts", 64),
        fields.size("num_experts_per_tok", 8),
        width,
        families.sparse_types(fields, families.after_dense(fields, 1)),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        factor=fields.number("routed_scaling_factor", 2.5),
        shared_width=width * fields.size("num_shared_experts", 1),
        wide=True,
        wide_weights=True,
    )
    return {"qk_norm": True, "experts": experts}


def _hunyuan(fields: Fields) -> Own:
    """Qwen3 with the norms of q and k behind the rotation."""
    return {**_as("qwen3", fields), "qk_norm": False, "rotated_qk_norm": True}


def _cohere(fields: Fields) -> Own:
    """Attention and MLP side by side, behind one norm without a bias; neighbours rotated together."""
    if fields.flag("use_qk_norm", False):
        raise fields.error("use_qk_norm", "norms with a weight of each head's own are not supported")
    bias, scale = fields.flag("attention_bias", False), fields.number("logit_scale", 0.0625, above=0.0)
    side = {"norm": "centred", "parallel": True, "neighbours": True}
    return {**side, "qkv_bias": bias, "o_bias": bias, "logit_divisor": 1 / scale}


def _cohere2(fields: Fields) -> Own:
    """With windows; layers that see everything do not rotate (arXiv:2504.00698)."""
    if "sliding_window" in fields.data and "sliding_window" not in fields:
        raise fields.error("sliding_window", "cohere2 without a window is not supported")
    return _cohere(fields)


def _arcee(fields: Fields) -> Own:
    """Llama with an MLP without a gate."""
    return {**_as("llama", fields), "gated": False}


def _stablelm(fields: Fields) -> Own:
    """Llama with LayerNorm, or the MLP beside attention."""
    if fields.flag("qk_layernorm", False):
        raise fields.error("qk_layernorm", "norms with a weight of each head's own are not supported")
    parallel = fields.flag("use_parallel_residual", False)
    return {"norm": "layer", "qkv_bias": fields.flag("use_qkv_bias", False), "parallel": parallel}


def _nemotron(fields: Fields) -> Own:
    """LayerNorm with 1 + weight, an MLP without a gate (arXiv:2402.16819)."""
    return {**_as("llama", fields), "norm": "layer_plus_one", "gated": False}


def _vaultgemma(fields: Fields) -> Own:
    """Gemma 2 without its norms behind the blocks (arXiv:2510.15001)."""
    return {**_as("gemma2", fields), "post_norms": False}


def _granitemoe(fields: Fields) -> Own:
    """Granite with experts; a softmax over the chosen ones' logits is each one's share of their sum."""
    experts = replace(
        _experts_as("mixtral", fields),
        count=fields.size("num_local_experts", 8),
        wide_weights=False,
    )
    return {**_as("granite", fields), "mlp_bias": False, "experts": experts}


def _ernie4_5_moe(fields: Fields) -> Own:
    """Ernie with experts, of whose softmax a bias corrects the choice."""
    if fields.flag("use_bias", False):
        raise fields.error("use_bias", "a shared expert with biases is not supported")
    count, width = fields.size("num_hidden_layers"), fields.size("moe_intermediate_size", 1536)
    first, step = (
        fields.size(f"moe_layer_{key}", 1, least=0 if key == "start_index" else 1)
        for key in ("start_index", "interval")
    )
    last = (
        count - 1 if fields.data.get("moe_layer_end_index", -1) == -1 else fields.size("moe_layer_end_index")
    )
    experts = ExpertsConfig(
        fields.size("moe_num_experts", 64),
        fields.size("moe_k", 6),
        width,
        tuple(first <= i <= last and (i + 1) % step == 0 for i in range(count)),
        correction=True,
        shared_width=width * fields.size("moe_num_shared_experts", 2, least=0),
        wide=True,
    )
    return {"neighbours": True, "experts": experts}


def _hunyuan_moe(fields: Fields) -> Own:
    """The same with experts, and one to which every token goes (arXiv:2411.02265)."""
    count, width = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    experts = ExpertsConfig(
        _same_in_all(fields, "num_experts", count),
        _same_in_all(fields, "moe_topk", count),
        width,
        (True,) * count,
        shared_width=width,
        wide=True,
        wide_weights=True,
    )
    return {**_hunyuan(fields), "experts": experts}


def _same_in_all(fields: Fields, key: str, layers: int) -> int:
    """A number, or a list with the same one for each layer."""
    stated = fields.data.get(key)
    if isinstance(stated, list):
        if len(stated) < layers or any(one != stated[0] for one in stated):
            raise fields.error(key, "layers that differ in it are not supported")
        return Fields({key: stated[0]}, fields.where).size(key)
    return fields.size(key, 1)


def _stating_windows(fields: Fields) -> None:
    if "layer_types" not in fields:
        raise fields.error("layer_types", "which layers have a window must be stated")


def _ministral(fields: Fields) -> Own:
    """Mistral with a window in some layers."""
    _stating_windows(fields)
    return {}


def _cwm(fields: Fields) -> Own:
    """Llama with a window in some layers (arXiv:2510.02387)."""
    _stating_windows(fields)
    return {"mlp_bias": fields.flag("mlp_bias", False)}


def _internlm3(fields: Fields) -> Own:
    """Llama by other names of its biases, which transformers reads as either all or none."""
    bias, mlp_bias = (
        fields.flag(own, fields.flag(usual, False))
        for own, usual in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))
    )
    if bias != mlp_bias:
        raise fields.error("qkv_bias", f"differs from bias = {fields.data.get('bias')}: not supported")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}


def _jais2(fields: Fields) -> Own:
    """Nemotron's MLP, LayerNorm, biases everywhere."""
    attention, mlp = fields.flag("attention_bias", True), fields.flag("mlp_bias", True)
    return {"norm": "layer", "gated": False, "qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def _hyperclovax(fields: Fields) -> Own:
    """Granite with norms behind the blocks as well, and logits that are multiplied."""
    if not fields.flag("use_post_norm", True):
        raise fields.error("use_post_norm", "without norms behind the blocks it is not supported")
    scale = fields.optional_number("attention_multiplier")
    divisor = 1 / fields.number("logits_scaling", 1.0, above=0.0)
    return {**_as("granite", fields), "score_scale": scale, "logit_divisor": divisor, "post_norms": True}


def _solar_open(fields: Fields) -> Own:
    """GLM-4.5 with experts in every layer, without norms of q and k."""
    count = fields.size("num_hidden_layers")
    experts = replace(_experts_as("glm4_moe", fields), layers=(True,) * count)
    return {"qkv_bias": fields.flag("attention_bias", False), "experts": experts}


def _flex_olmo(fields: Fields) -> Own:
    """OLMo-2 with experts (arXiv:2507.07024)."""
    experts = replace(_experts_as("olmoe", fields), top_k=fields.size("num_experts_per_tok", 5))
    return {**_as("olmo2", fields), "experts": experts}


def _youtu(fields: Fields) -> Own:
    """DeepSeek-V3's attention without experts."""
    return {
        "o_bias": fields.flag("attention_bias", False),
        "neighbours": fields.flag("rope_interleave", True),
    }


def _apertus(fields: Fields) -> Own:
    """Qwen3 with an MLP without a gate, whose activation is trained (arXiv:2509.14233)."""
    return {**_as("qwen3", fields), "gated": False}


def _phi(fields: Fields) -> Own:
    """The MLP, without a gate, beside attention; LayerNorm, of heads of q and k too; biases everywhere
    (arXiv:2309.05463)."""
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_bias": True}
    norms = {"norm": "layer", "qk_norm": fields.flag("qk_layernorm", False)}
    return {**biases, **norms, "parallel": True, "gated": False}


def _olmo(fields: Fields) -> Own:
    """Llama with LayerNorm that has no weights, and q, k and v clamped (arXiv:2402.00838)."""
    clip = fields.optional_number("clip_qkv", above=0.0)
    return {**_as("llama", fields), "mlp_bias": False, "norm": "bare", "clip_qkv": clip}


RULES: Mapping[Family, FamilyRules] = {
    **families.RULES,
    "starcoder2": FamilyRules(
        _starcoder2, 4096, eps=1e-5, eps_key="norm_epsilon", tied=True, own_kv_heads=True, windows="all",
        activation=("hidden_act", "gelu_pytorch_tanh"),
    ),
    "gemma": FamilyRules(
        _gemma, 8192, tied=True, own_kv_heads=True, head_dim=256, activation=("hidden_act", "gelu_pytorch_tanh")
    ),
    "seed_oss": FamilyRules(_seed_oss, 524288, own_kv_heads=True, head_dim=128),
    "exaone4": FamilyRules(
        _exaone4, 2048, eps=1e-5, own_kv_heads=True, windows="typed", window=4096, full_every=4, unrotated_full=True
    ),
    "ernie4_5": FamilyRules(_ernie4_5, 131072, eps=1e-5, tied=True, theta=5e5, own_kv_heads=True, head_dim=128),
    "glm": replace(families.RULES["glm4"], own=_glm),
    "helium": FamilyRules(_helium, 4096, eps=1e-8, theta=1e5, own_kv_heads=True, head_dim=128),
    "dots1": FamilyRules(_dots1, 2048, own_kv_heads=True, windows="late", window=4096),
    "exaone_moe": FamilyRules(
        _exaone_moe, 2048, eps=1e-5, own_kv_heads=True, windows="typed", window=4096, full_every=4,
        unrotated_full=True,
    ),
    "hunyuan_v1_dense": FamilyRules(_hunyuan, 2048, eps=1e-5, ntk_alpha=True),
    "cohere": FamilyRules(_cohere, 8192, eps=1e-5, eps_key="layer_norm_eps", tied=True, theta=5e5),
    "cohere2": FamilyRules(
        _cohere2, 8192, eps=1e-5, eps_key="layer_norm_eps", tied=True, windows="typed", window=4096, full_every=4,
        unrotated_full=True,
    ),
    "arcee": FamilyRules(_arcee, 4096, eps=1e-5, activation=("hidden_act", "relu2")),
    "stablelm": FamilyRules(
        _stablelm, 4096, eps=1e-5, eps_key="layer_norm_eps", own_kv_heads=True, partial_rotary=0.25
    ),
    "nemotron": FamilyRules(
        _nemotron, 4096, eps=1e-5, eps_key="norm_eps", activation=("hidden_act", "relu2"), partial_rotary=0.5
    ),
    "vaultgemma": replace(families.RULES["gemma2"], own=_vaultgemma),
    "granitemoe": FamilyRules(_granitemoe, 2048),
    "ernie4_5_moe": FamilyRules(_ernie4_5_moe, 131072, eps=1e-5, tied=True, theta=5e5, own_kv_heads=True),
    "ministral": FamilyRules(_ministral, 131072, own_kv_heads=True, windows="typed", window=4096),
    "cwm": FamilyRules(
        _cwm, 131072, eps=1e-5, own_kv_heads=True, theta=1e6, head_dim=128, windows="typed", window=8192,
        rope={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192},
    ),
    "internlm3": FamilyRules(_internlm3, 32768, eps=1e-5, own_kv_heads=True, head_dim=128),
    "iquestcoder": FamilyRules(families.RULES["llama"].own, 131072, eps=1e-5, own_kv_heads=True, head_dim=128),
    "jais2": FamilyRules(_jais2, 8192, eps=1e-5, eps_key="layer_norm_eps", activation=("hidden_act", "relu2")),
    "hyperclovax": FamilyRules(_hyperclovax, 2048),
    "solar_open": FamilyRules(_solar_open, 131072, eps=1e-5, own_kv_heads=True, theta=1e6, head_dim=128),
    "youtu": FamilyRules(_youtu, 131072, tied=True, latent=latent_of),
    "flex_olmo": FamilyRules(_flex_olmo, 4096, theta=5e5),
    "hunyuan_v1_moe": FamilyRules(_hunyuan_moe, 2048, eps=1e-5, ntk_alpha=True),
    "llama4_text": LLAMA4,
    "mistral4": MISTRAL4,
    "phimoe": PHIMOE,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "apertus": FamilyRules(
        _apertus, 65_536, eps=1e-5, theta=12e6, activation=("hidden_act", "xielu"),
        rope={"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "olmo": FamilyRules(_olmo, 2048, eps=1e-5, eps_key=""),
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "granitemoehybrid": GRANITE_HYBRID,
    "nemotron_h": NEMOTRON_H,
    "bamba": BAMBA,
    "falcon_h1": FALCON_H1,
    "phi": FamilyRules(
        _phi, 2048, eps=1e-5, eps_key="layer_norm_eps", activation=("hidden_act", "gelu_new"), partial_rotary=0.5
    ),
}  # fmt: skip
