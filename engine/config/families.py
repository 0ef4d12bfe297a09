"""What each family's model does differently from Llama's, and what its configuration class assumes where config.json is
silent: as in transformers 5 (`models/*/configuration_*.py`, `modeling_*.py`). Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from lockstep.engine.config.experts import ExpertsConfig, expert_count, experts_beside, sparse_layers
from lockstep.engine.config.family_names import FurtherFamily
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.latent import LatentConfig, latent_of
from lockstep.engine.config.layer_shapes import layer_inputs
from lockstep.engine.config.linear_attention import linear_attention

Family = Literal[
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "smollm3",
    "glm4",
    "olmo3",
    "starcoder2",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "gpt_oss",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma4_text",
    FurtherFamily,
]
FAMILIES: tuple[Family, ...] = get_args(Family)
#: How a norm's weight is applied: to what was rounded, before that (`wide`), before that and with 1 added; LayerNorm,
#: that with 1 added to the weight, that without a bias, and that without a weight either.
NormForm = Literal["rms", "wide", "plus_one", "layer", "layer_plus_one", "centred", "bare"]
#: The activation of the MLP's gate; GELU exact, or by a tanh; the square of ReLU; xIELU, which has numbers of its own.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The gate of gpt-oss: x · sigmoid(slope · x) of gate cut off above `limit`, times 1 + up within ±limit."""

    limit: float
    slope: float


#: What is made of gate and up: an activation of the gate times up, or that.
Gating = Activation | ClampedSwiGLU
#: Which layers have a sliding window: none, all, all where it is switched on, those that are switched on, those from
#: one on, those of that type; chunks in those that rotate.
Windows = Literal["none", "all", "all_switched", "switched", "late", "typed", "chunked"]

#: Fields of `ModelConfig` that differ from their defaults.
Own = Mapping[str, Any]


def _biased(fields: Fields) -> Own:
    """`attention_bias` is of all four products."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(fields: Fields) -> Own:
    return {**_biased(fields), "mlp_bias": fields.flag("mlp_bias", False)}


def _qwen2(fields: Fields) -> Own:
    return {"qkv_bias": True}  # always, and never an o bias: `attention_bias` is not read


def _qwen3(fields: Fields) -> Own:
    return {**_biased(fields), "qk_norm": True}


def _mistral(fields: Fields) -> Own:
    return {}  # no biases: `attention_bias` is not read


def _olmo2(fields: Fields) -> Own:
    """Norms behind the blocks instead of before them, and over all heads of q and k (arXiv:2501.00656)."""
    norms = {"norm": "wide", "pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True}
    return {**_biased(fields), **norms}


def _gemma2(fields: Fields) -> Own:
    """Norms on both sides of the blocks, with 1 + weight; scores and logits under soft caps (arXiv:2408.00118)."""
    cap = fields.optional_number("attn_logit_softcapping", default=50.0, above=0.0)
    return {**_gemma(fields, 30.0), "score_cap": cap or 0.0}


def _gemma3(fields: Fields) -> Own:
    """QK norms instead of a cap of the scores, and a rotation of their own for layers with a window
    (arXiv:2503.19786)."""
    return {**_gemma(fields, None), "qk_norm": True}  # `attn_logit_softcapping` is not read


def _gemma4(fields: Fields) -> Own:
    """Norms of values, which have no weight, and a factor of each layer's output; layers of several sizes, which may
    share keys and values, inputs of each layer's own (`layer_shapes`), and of some models experts beside the MLP."""
    return {
        **_gemma(fields, None),
        "experts": experts_beside(fields),
        "norm": "wide",
        "qk_norm": True,
        "value_norm": True,
        "score_scale": 1.0,
        "layer_scalar": True,
        "layer_inputs": layer_inputs(fields),
    }


def _gemma(fields: Fields, cap: float | None) -> Own:
    return {
        **_biased(fields),
        "norm": "plus_one",
        "post_norms": True,
        "score_scale": fields.number("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
        "logit_cap": fields.optional_number("final_logit_softcapping", default=cap, above=0.0) or 0.0,
        "embedding_multiplier": fields.size("hidden_size") ** 0.5,
    }


def _phi3(fields: Fields) -> Own:
    """As Llama, but that q, k and v are one tensor in the checkpoint, and gate and up (arXiv:2404.14219)."""
    parameters = fields.object("rope_scaling") or fields.object("rope_parameters") or Fields({}, fields.where)
    for key in ("rope_type", "type"):
        if parameters.word(key, "default") not in ("default", "longrope"):
            raise parameters.error(key, "not a rotary scaling of phi3; supported are default and longrope")
    return {}


def _granite(fields: Fields) -> Own:
    """Multipliers of the embeddings, the scores, what is added to the stream and the logits (arXiv:2405.04324)."""
    return {
        **_llama(fields),
        "score_scale": fields.number("attention_multiplier", 1.0),
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logit_divisor": fields.number("logits_scaling", 1.0, above=0.0),
    }


def _glm4(fields: Fields) -> Own:
    """Norms on both sides of the blocks; the first half of each head is rotated, neighbours together
    (arXiv:2406.12793)."""
    return {"qkv_bias": fields.flag("attention_bias", True), "post_norms": True, "neighbours": True}


def _qwen3_moe(fields: Fields) -> Own:
    """Qwen3 with experts in place of most MLPs (arXiv:2505.09388)."""
    experts = ExpertsConfig(
        expert_count(fields, ("num_experts", "num_local_experts")),
        fields.size("num_experts_per_tok", 8),
        fields.size("moe_intermediate_size", 768),
        sparse_layers(fields),
        renormalised=fields.flag("norm_topk_prob", False),
    )
    return {**_qwen3(fields), "experts": experts}


def _mixtral(fields: Fields) -> Own:
    """Mistral with experts in place of MLPs (arXiv:2401.04088)."""
    experts = ExpertsConfig(
        expert_count(fields, ("num_local_experts", "num_experts")),
        fields.size("num_experts_per_tok", 2),
        fields.size("intermediate_size"),
        _every_layer(fields),
        wide_weights=True,
    )
    return {"experts": experts}


def _olmoe(fields: Fields) -> Own:
    """Experts in place of MLPs, norms over all heads of q and k (arXiv:2409.02060)."""
    if "clip_qkv" in fields:
        raise fields.error("clip_qkv", "clamped projections are not supported")
    experts = ExpertsConfig(
        expert_count(fields, ("num_experts", "num_local_experts")),
        fields.size("num_experts_per_tok", 8),
        fields.size("intermediate_size"),
        _every_layer(fields),
        renormalised=fields.flag("norm_topk_prob", False),
    )
    return {**_biased(fields), "qk_norm": True, "qk_norm_whole": True, "experts": experts}


def _qwen2_moe(fields: Fields) -> Own:
    """Qwen2 with experts, and one to which every token goes, through a gate (arXiv:2407.10671)."""
    if fields.flag("use_sliding_window", False) and "layer_types" not in fields:
        raise fields.error("use_sliding_window", "which layers have a window must be stated by layer_types")
    experts = ExpertsConfig(
        expert_count(fields, ("num_experts", "num_local_experts")),
        fields.size("num_experts_per_tok", 4),
        fields.size("moe_intermediate_size", 1408),
        sparse_layers(fields),
        renormalised=fields.flag("norm_topk_prob", False),
        shared_width=fields.size("shared_expert_intermediate_size", 5632),
        shared_gated=True,
    )
    return {"qkv_bias": fields.flag("qkv_bias", True), "experts": experts}


def _glm4_moe(fields: Fields) -> Own:
    """Routing as in DeepSeek-V3: sigmoids, of which a bias corrects the choice (arXiv:2508.06471, arXiv:2412.19437)."""
    return {
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
        "experts": _corrected_experts(fields, after_dense(fields, 1), 8, 1408, (1, 1), 1.0),
    }


def _corrected_experts(
    fields: Fields, layers: tuple[bool, ...], top_k: int, width: int, groups: tuple[int, int], factor: float
) -> ExpertsConfig:
    """Scores are sigmoids, of which a bias corrects the choice; the numbers are what the family assumes."""
    width = fields.size("moe_intermediate_size", width)
    return ExpertsConfig(
        expert_count(fields, ("n_routed_experts", "num_local_experts")),
        fields.size("num_experts_per_tok", top_k),
        width,
        layers,
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", groups[0]),
        top_groups=fields.size("topk_group", groups[1]),
        factor=fields.number("routed_scaling_factor", factor),
        shared_width=width * fields.size("n_shared_experts", 1),
        wide=True,
        wide_weights=True,
    )


def _deepseek_v3(fields: Fields) -> Own:
    """Latent attention, experts in groups (arXiv:2412.19437)."""
    return {
        **_latent(fields),
        "experts": _corrected_experts(fields, after_dense(fields, 3), 8, 2048, (8, 4), 2.5),
        "neighbours": fields.flag("rope_interleave", True),
    }


def _glm4_moe_lite(fields: Fields) -> Own:
    """DeepSeek-V3's attention in GLM-4.7-Flash."""
    layers = sparse_types(fields, tuple(i > 0 for i in range(fields.size("num_hidden_layers"))))
    return {
        **_latent(fields),
        "experts": _corrected_experts(fields, layers, 4, 1536, (1, 1), 1.8),
        "neighbours": fields.flag("rope_interleave", True),
    }


def _deepseek_v2(fields: Fields) -> Own:
    """Latent attention; scores are a softmax, of groups the best expert counts (arXiv:2405.04434)."""
    method, width = fields.word("topk_method", "greedy"), fields.size("moe_intermediate_size", 1407)
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error(
            "topk_method", "not a supported choice; supported are greedy, group_limited_greedy"
        )
    grouped = method == "group_limited_greedy"
    experts = ExpertsConfig(
        expert_count(fields, ("n_routed_experts", "num_experts")),
        fields.size("num_experts_per_tok"),
        width,
        after_dense(fields, 0),
        renormalised=False,  # `norm_topk_prob` is not read
        groups=fields.size("n_group") if grouped else 1,
        top_groups=fields.size("topk_group") if grouped else 1,
        group_best=1,
        factor=fields.number("routed_scaling_factor", 1.0),
        shared_width=width * fields.size("n_shared_experts", 2),
        wide=True,
        wide_weights=True,
    )
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "a shared expert with biases is not supported")
    return {**_latent(fields), "experts": experts, "neighbours": True}


def _latent(fields: Fields) -> Own:
    """What models with latent attention have in common."""
    return {"o_bias": fields.flag("attention_bias", False)}


def sparse_types(fields: Fields, assumed: tuple[bool, ...]) -> tuple[bool, ...]:
    """The layers that `mlp_layer_types` calls sparse; without it those that are assumed."""
    count, types = len(assumed), fields.words("mlp_layer_types")
    if types is not None and (len(types) != count or set(types) - {"dense", "sparse"}):
        raise fields.error("mlp_layer_types", f"expected {count} words, dense or sparse")
    return assumed if types is None else tuple(one == "sparse" for one in types)


def after_dense(fields: Fields, dense: int) -> tuple[bool, ...]:
    """The first `first_k_dense_replace` layers have no experts."""
    dense = fields.size("first_k_dense_replace", dense, least=0)
    return tuple(i >= dense for i in range(fields.size("num_hidden_layers")))


def _gpt_oss(fields: Fields) -> Own:
    """Experts with biases behind a clamped SwiGLU, and a sink of each head in the softmax (arXiv:2508.10925). A softmax
    over the chosen experts' logits is each one's share of their sum."""
    experts = ExpertsConfig(
        expert_count(fields, ("num_local_experts", "num_experts")),
        fields.size("num_experts_per_tok", 4),
        fields.size("intermediate_size"),
        _every_layer(fields),
        biased=True,
    )
    limit, slope = (
        fields.number(f"swiglu_{key}", default, above=0.0)
        for key, default in (("limit", 7.0), ("alpha", 1.702))
    )
    bias = fields.flag("attention_bias", True)
    return {
        "norm": "wide",
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "clamp": ClampedSwiGLU(limit, slope),
        "experts": experts,
    }


def _minimax_m2(fields: Fields) -> Own:
    """Sigmoids, of which a bias corrects the choice; norms over all heads of q and k (arXiv:2506.13585)."""
    experts = ExpertsConfig(
        expert_count(fields, ("num_local_experts", "num_experts")),
        fields.size("num_experts_per_tok", 8),
        fields.size("intermediate_size"),
        _every_layer(fields),
        scores="sigmoid",
        correction=True,
        wide_weights=True,
    )
    return {"qk_norm": True, "qk_norm_whole": True, "experts": experts}


def _qwen3_5(fields: Fields) -> Own:
    """Most layers with a recurrent state (Gated DeltaNet, arXiv:2412.06464), the others with gated attention
    (arXiv:2505.06708)."""
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "biases beside a gate of attention are not supported")
    return {"norm": "plus_one", "qk_norm": True, "output_gate": True, "linear": linear_attention(fields)}


def _qwen3_5_moe(fields: Fields) -> Own:
    """The same with experts in every layer."""
    return {**_qwen3_5(fields), "experts": _gated_shared(fields, _every_layer(fields), 8, 256, True)}


def _qwen3_next(fields: Fields) -> Own:
    """The same with experts in most layers."""
    renormalised = fields.flag("norm_topk_prob", True)
    experts = _gated_shared(fields, sparse_layers(fields), 10, 512, renormalised)
    return {**_qwen3_5(fields), "experts": experts}


def _gated_shared(
    fields: Fields, layers: tuple[bool, ...], top_k: int, count: int, renormalised: bool
) -> ExpertsConfig:
    return ExpertsConfig(
        fields.size("num_experts", count),
        fields.size("num_experts_per_tok", top_k),
        fields.size("moe_intermediate_size", 512),
        layers,
        renormalised=renormalised,
        shared_width=fields.size("shared_expert_intermediate_size", 512),
        shared_gated=True,
    )


def _every_layer(fields: Fields) -> tuple[bool, ...]:
    return (True,) * fields.size("num_hidden_layers")


@dataclass(frozen=True, slots=True)
class FamilyRules:
    """`own(fields)`: what the family's models do differently. The others are what is assumed of keys that are missing:
    `head_dim` None: hidden / heads; `own_kv_heads`: unrelated to `heads`: must be stated; `activation`: its key and
    value; `full_every`: of so many layers the last sees everything; `local_theta`: the rotary base of layers with a
    window; `partial_rotary`: the rotated share of each head, None where engines disagree; `unrotated_every`: of so many
    the last does not rotate; `unrotated_full`: beside windows, layers that see everything do not rotate; `ntk_alpha`:
    `dynamic` scaling with an `alpha` stretches the base, once; `latent`: how keys and values are made from latents;
    `eps_key`: "" where no key states the epsilon; `linear`, `short_conv`: layers may have either; `intermediate`: the
    MLP's width, None where it must be stated; `shaped`: layers differ in size by type, the last one sees everything;
    `layer_types`: of each layer its kind, where it is stated otherwise; `rotates`: whether any attention does."""

    own: Callable[[Fields], Own]
    max_position: int
    eps: float = 1e-6
    eps_key: str = "rms_norm_eps"
    tied: bool = False
    theta: float = 10_000.0
    head_dim: int | None = None
    own_kv_heads: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    windows: Windows = "none"
    window: int | None = None
    window_key: str = "sliding_window"
    full_every: int | None = None
    local_theta: tuple[str, float] | None = None
    partial_rotary: float | None = None
    unrotated_every: int | None = None
    unrotated_full: bool = False
    ntk_alpha: bool = False
    latent: Callable[[Fields], LatentConfig] | None = None
    rope: Mapping[str, Any] | None = None
    linear: bool = False
    short_conv: bool = False
    intermediate: int | None = None
    intermediate_key: str = "intermediate_size"
    shaped: bool = False
    layer_types: Callable[[Fields], list[str]] | None = None
    rotates: Callable[[Fields], bool] | None = None


_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

RULES: Mapping[Family, FamilyRules] = {
    "qwen2": FamilyRules(_qwen2, 32768, own_kv_heads=True, windows="switched", window=4096),
    "qwen3": FamilyRules(_qwen3, 32768, own_kv_heads=True, head_dim=128, windows="switched", window=4096),
    "llama": FamilyRules(_llama, 2048),
    "mistral": FamilyRules(_mistral, 131072, own_kv_heads=True, windows="all", window=4096),
    "olmo2": FamilyRules(_olmo2, 2048, eps=1e-5),
    "gemma2": FamilyRules(
        _gemma2, 8192, tied=True, own_kv_heads=True, head_dim=256, activation=GEMMA_ACTIVATION, windows="typed",
        window=4096, full_every=2,
    ),
    "gemma3_text": FamilyRules(
        _gemma3, 131072, tied=True, own_kv_heads=True, theta=1e6, local_theta=("rope_local_base_freq", 1e4),
        head_dim=256, activation=GEMMA_ACTIVATION, windows="typed", window=4096, full_every=6,
    ),
    "phi3": FamilyRules(_phi3, 4096, eps=1e-5, windows="all", partial_rotary=1.0),
    "granite": FamilyRules(_granite, 2048),
    "smollm3": FamilyRules(
        _llama, 32768, tied=True, own_kv_heads=True, theta=2e6, windows="switched", unrotated_every=4
    ),
    "glm4": FamilyRules(_glm4, 131072, own_kv_heads=True, eps=1.5625e-7, head_dim=128, partial_rotary=0.5),
    "olmo3": FamilyRules(
        _olmo2, 2048, eps=1e-5, theta=5e5, local_theta=("", 5e5), windows="typed", window=4096, full_every=4
    ),
    "qwen3_moe": FamilyRules(_qwen3_moe, 32768, own_kv_heads=True, windows="all_switched", window=4096),
    "mixtral": FamilyRules(_mixtral, 131072, eps=1e-5, own_kv_heads=True, theta=1e6, windows="all"),
    "olmoe": FamilyRules(_olmoe, 4096, eps=1e-5),
    "qwen2_moe": FamilyRules(_qwen2_moe, 32768, own_kv_heads=True, windows="switched", window=4096),
    "glm4_moe": FamilyRules(_glm4_moe, 131072, eps=1e-5, own_kv_heads=True, partial_rotary=0.5),
    "deepseek_v2": FamilyRules(_deepseek_v2, 2048, latent=latent_of),
    "deepseek_v3": FamilyRules(_deepseek_v3, 4096, latent=latent_of),
    "glm4_moe_lite": FamilyRules(
        _glm4_moe_lite, 202752, eps=1e-5, latent=partial(latent_of, plain_dim=192, value_dim=256, q_rank=768)
    ),
    "gpt_oss": FamilyRules(
        _gpt_oss, 131072, eps=1e-5, own_kv_heads=True, theta=150_000.0, head_dim=64, windows="typed", window=128,
        full_every=2, rope={"rope_type": "yarn", "factor": 32.0, "truncate": False,
                            "original_max_position_embeddings": 4096},
    ),
    "minimax_m2": FamilyRules(
        _minimax_m2, 196608, own_kv_heads=True, theta=5e6, head_dim=128, partial_rotary=1.0
    ),
    "qwen3_next": FamilyRules(
        _qwen3_next, 32768, own_kv_heads=True, head_dim=256, partial_rotary=0.25, linear=True, intermediate=5632
    ),
    "qwen3_5_text": FamilyRules(
        _qwen3_5, 32768, own_kv_heads=True, head_dim=256, partial_rotary=0.25, linear=True
    ),
    "qwen3_5_moe_text": FamilyRules(
        _qwen3_5_moe, 32768, own_kv_heads=True, head_dim=256, partial_rotary=0.25, linear=True, intermediate=512
    ),
    "gemma4_text": FamilyRules(
        _gemma4, 131072, tied=True, own_kv_heads=True, theta=1e6, local_theta=("", 1e4), head_dim=256, windows="typed",
        activation=GEMMA_ACTIVATION, window=512, full_every=6, rope=_PROPORTIONAL, shaped=True,
    ),
}  # fmt: skip
