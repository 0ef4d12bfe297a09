"""The catalogue of known bugs, as plain facts (torch-free): what the toggles list and `--rule` know.

A fault is switched on by a *rule*, NAME=VALUE; every rule's default is the correct behaviour. `patch`
names the function in `engine.faults.patches` that replaces the seams. Sources are issue threads of
public engines, or "seed" for the two teams whose bugs this debugger was built to name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.config import ModelConfig
from engine.errors import ConfigError

Level = Literal["step", "build", "load"]
Group = Literal["mask", "attention", "rope", "cache", "gqa", "sharding", "bias", "loading", "norm", "mlp"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One known bug.

    `level` is what a toggle costs: "step" acts from the next forward, "build" empties the cache, "load"
    reads weights again. `first_tap` is where it shows first (`*` for the layer), `step` in which pass.
    """

    id: str
    rule: str
    value: str
    title: str
    group: Group
    level: Level
    first_tap: str
    step: int
    symptom: str
    source: str
    patch: str
    needs: str = ""  # a key of _NEEDS

    def acts_on(self, model: ModelConfig, tp: int) -> str | None:
        """None where the fault can act; otherwise why it cannot."""
        return _NEEDS[self.needs](model, tp) if self.needs else None


def _qkv_bias(model: ModelConfig, tp: int) -> str | None:
    return None if model.qkv_bias else "the model has no q/k/v biases"


def _ranks(model: ModelConfig, tp: int) -> str | None:
    return None if tp > 1 else "needs two ranks or more (--tp 2)"


def _groups(model: ModelConfig, tp: int) -> str | None:
    if model.num_heads == model.num_kv_heads:
        return "the model has as many KV heads as heads"
    alone = model.num_heads // tp == 1
    return "each rank holds a single head, with its own copy of the KV head" if alone else None


def _groups_on_a_rank(model: ModelConfig, tp: int) -> str | None:
    return _groups(model, tp) or (None if model.num_kv_heads > tp else "each rank holds a single KV head")


def _row_bias(model: ModelConfig, tp: int) -> str | None:
    return _ranks(model, tp) or (None if model.o_bias or model.mlp_bias else "the model has no row biases")


def _qk_norm(model: ModelConfig, tp: int) -> str | None:
    return None if model.qk_norm else "the model does not normalise q and k"


def _window(model: ModelConfig, tp: int) -> str | None:
    return None if any(model.windows) else "the model has no sliding window"


def _layers(model: ModelConfig, tp: int) -> str | None:
    return None if model.num_layers > 1 else "the model has a single layer"


def _other_theta(model: ModelConfig, tp: int) -> str | None:
    return "the model's rope_theta is 10000" if model.rope_theta == 10000 else None


def _other_eps(model: ModelConfig, tp: int) -> str | None:
    return "the model's epsilon is 1e-5" if model.rms_eps == 1e-5 else None


_NEEDS = {
    "layers": _layers,
    "other_theta": _other_theta,
    "other_eps": _other_eps,
    "qkv_bias": _qkv_bias,
    "ranks": _ranks,
    "groups": _groups,
    "groups_on_a_rank": _groups_on_a_rank,
    "row_bias": _row_bias,
    "qk_norm": _qk_norm,
    "window": _window,
}

#: The rules' correct values, in the order in which toggles are listed.
DEFAULTS: Mapping[str, str] = {
    "mask": "filled",
    "load_bias": "true",
    "rope": "half_split",
    "rope_theta": "config",
    "positions": "counted",
    "cache_reuse": "true",
    "cache_layer": "own",
    "cache_heads": "kv",
    "kv_expand": "interleaved",
    "scale": "head_dim",
    "window": "config",
    "qkv_shard_dim": "0",
    "qkv_sizes": "local",
    "reduce": "sum",
    "row_bias": "once",
    "norm": "rms",
    "act": "silu_gate",
    "lm_head": "config",
}

FAULTS: tuple[Fault, ...] = (
    Fault(
        "additive-mask", "mask", "additive", "additive mask made by multiplying with -inf", "mask", "step",
        "layers.*.attn.scores", 0,
        "0 * -inf is NaN in every cell the mask allows: all scores of the first layer, then everything",
        "seed S01", "additive_mask",
    ),
    Fault(
        "no-mask", "mask", "none", "attention without a causal mask", "mask", "step",
        "layers.*.attn.scores", 0,
        "tokens attend to later ones: the prefill is wrong, a decode step only where a window is lost as well",
        "turboderp/exllama#101", "no_mask",
    ),
    Fault(
        "bias-not-loaded", "load_bias", "false", "q/k/v biases never loaded", "bias", "load",
        "layers.*.attn.q_proj", 0, "every token's q, k and v are off by the same vector: minus the bias",
        "seed S08", "skip_qkv_bias", "qkv_bias",
    ),
    Fault(
        "rope-swallowed", "rope", "swallowed", "RoPE called with the wrong arguments, the error swallowed",
        "rope", "step", "layers.*.attn.q_rope", 0, "q and k are not rotated at all; the first token is right",
        "seed S04", "rope_swallowed",
    ),
    Fault(
        "rope-interleaved", "rope", "interleaved", "RoPE on pairs (2i, 2i+1) of half-split weights", "rope",
        "step", "layers.*.attn.q_rope", 0, "norms of neighbouring pairs are kept, angles are mixed up",
        "NeuraLegion/shainet#111", "rope_interleaved",
    ),
    Fault(
        "rope-twice", "rope", "twice", "RoPE applied twice", "rope", "step", "layers.*.attn.q_rope", 0,
        "every angle is twice what it should be", "NVIDIA/TensorRT-LLM#4040", "rope_twice",
    ),
    Fault(
        "rope-theta-dropped", "rope_theta", "10000", "rope_theta lost: the default 10000 is used", "rope",
        "step", "layers.*.attn.q_rope", 0, "fast pairs are right, slow pairs turn too fast",
        "lyogavin/airllm#369", "rope_theta_default", "other_theta",
    ),
    Fault(
        "position-stuck", "positions", "stuck", "decode position stuck at 0", "cache", "step",
        "layers.*.attn.q_rope", 1,
        "from the first decode step each token is rotated by 0, overwrites slot 0 and sees only itself",
        "seed S09", "positions_stuck",
    ),
    Fault(
        "position-ahead", "positions", "ahead", "decode positions one too far", "cache", "step",
        "layers.*.attn.q_rope", 1,
        "the past counts the present token: rotated one too far, and a slot never written is read",
        "microsoft/onnxruntime-genai#2354", "positions_ahead",
    ),
    Fault(
        "cache-not-reused", "cache_reuse", "false", "KV cache ignored in decode", "cache", "step",
        "layers.*.attn.k_cache", 1, "a decode step attends to its own token only", "seed S05",
        "cache_not_reused",
    ),
    Fault(
        "cache-shared-by-layers", "cache_layer", "shared", "all layers write to one layer's cache", "cache",
        "build", "layers.*.attn.k_cache", 1,
        "the first layer's cache holds what the last one wrote, the others' hold nothing; the prefill is right",
        "dingodb/DingoCache#116", "cache_shared", "layers",
    ),
    Fault(
        "repeated-heads-cached", "cache_heads", "repeated", "GQA-repeated heads stored in the cache", "gqa",
        "build", "layers.*.attn.k_cache", 0,
        "the cache holds every KV head as often as it is read, and is read as if it did not", "seed S06",
        "cache_repeated_heads", "groups",
    ),
    Fault(
        "kv-tiled", "kv_expand", "tiled", "KV heads tiled instead of interleaved", "gqa", "step",
        "layers.*.attn.scores", 0, "query head h reads KV head h % n instead of h // group",
        "onnx/onnx#7274", "kv_tiled", "groups_on_a_rank",
    ),
    Fault(
        "scale-missing", "scale", "one", "attention scores not scaled", "attention", "step",
        "layers.*.attn.scores", 0, "scores are sqrt(head_dim) times too large", "mlc-ai/mlc-llm#3426",
        "scale_one",
    ),
    Fault(
        "scale-by-width", "scale", "hidden", "attention scaled by the model's width", "attention", "step",
        "layers.*.attn.scores", 0, "scores are too small by a constant factor",
        "karpathy/ng-video-lecture#6", "scale_by_hidden",
    ),
    Fault(
        "window-one-more", "window", "one_more", "sliding window one token too wide", "attention", "step",
        "layers.*.attn.scores", 0, "right up to the window's length, then one key too many",
        "huggingface/transformers#39408", "window_one_more", "window",
    ),
    Fault(
        "window-ignored", "window", "ignored", "sliding window ignored", "attention", "step",
        "layers.*.attn.scores", 0, "right up to the window's length, then attends to everything",
        "huggingface/transformers#35691", "window_ignored", "window",
    ),
    Fault(
        "qkv-sharded-on-in-features", "qkv_shard_dim", "1", "q/k/v sharded along in_features", "sharding",
        "load", "layers.*.attn.q_proj", 0,
        "each rank holds a partial product of all heads; the ranks' sum is right, none of them is",
        "seed S02", "qkv_in_features", "ranks",
    ),
    Fault(
        "qkv-sizes-mixed", "qkv_sizes", "mixed", "q|k|v offsets from global head counts", "sharding", "step",
        "layers.*.attn.k_proj", 0, "every column is a right column in a wrong slot", "seed S07",
        "qkv_sizes_mixed", "ranks",
    ),
    Fault(
        "reduce-missing", "reduce", "missing", "row-parallel results never summed", "sharding", "step",
        "layers.*.attn.o_proj", 0, "every rank goes on with its own partial; their sum would be right",
        "intel/ipex-llm#10558", "reduce_missing", "ranks",
    ),
    Fault(
        "reduce-twice", "reduce", "twice", "all-reduce done twice", "sharding", "step",
        "layers.*.attn.o_proj", 0, "the sum is tp times too large", "lightseekorg/tokenspeed#80",
        "reduce_twice", "ranks",
    ),
    Fault(
        "row-bias-per-rank", "row_bias", "every_rank", "row-parallel bias added on every rank", "bias",
        "step", "layers.*.attn.o_proj", 0, "the bias is counted tp times", "Wenyueh/MinivLLM#80",
        "row_bias_every_rank", "row_bias",
    ),
    Fault(
        "norm-eps", "norm", "eps_1e-5", "RMSNorm epsilon hard-coded", "norm", "step", "layers.*.attn_norm", 0,
        "a small error where activations are small, shrinking with depth", "ggml-org/llama.cpp#2373",
        "norm_eps", "other_eps",
    ),
    Fault(
        "norm-plus-one", "norm", "plus_one", "RMSNorm weight applied as 1 + w", "norm", "step",
        "layers.*.attn_norm", 0, "every channel is off by (1 + w) / w", "quantumaikr/quant.cpp#23",
        "norm_plus_one",
    ),
    Fault(
        "gate-up-swapped", "act", "swapped", "silu(up) * gate", "mlp", "step", "layers.*.mlp.act", 0,
        "gate and up are right, their product is not", "ml-explore/mlx-lm#767", "act_swapped",
    ),
    Fault(
        "gelu", "act", "gelu", "GELU instead of SiLU", "mlp", "step", "layers.*.mlp.act", 0,
        "gate and up are right, the activation is another function", "NVIDIA/TensorRT-Model-Connect#177",
        "act_gelu",
    ),
    Fault(
        "head-missing", "lm_head", "missing", "output head left at its initial values", "loading", "load",
        "logits", 0, "everything up to the final norm is right, the logits are noise", "seed S03",
        "head_missing",
    ),
)  # fmt: skip

_BY_RULE = {(fault.rule, fault.value): fault for fault in FAULTS}


def faults_of(rules: Mapping[str, str]) -> list[Fault]:
    """The faults that `rules` (name -> value) switch on, in the catalogue's order.

    ConfigError for an unknown name or value, naming those that exist.
    """
    found = []
    for name, value in rules.items():
        if name not in DEFAULTS:
            raise ConfigError(f"there is no rule {name!r}: use one of {', '.join(DEFAULTS)}")
        if value == DEFAULTS[name]:
            continue
        if (name, value) not in _BY_RULE:
            known = [DEFAULTS[name], *(f.value for f in FAULTS if f.rule == name)]
            raise ConfigError(f"rule {name} has no value {value!r}: use one of {', '.join(known)}")
        found.append(_BY_RULE[name, value])
    return sorted(found, key=FAULTS.index)


def check_rules(rules: Mapping[str, str], model: ModelConfig, tp: int) -> list[Fault]:
    """The faults of `rules`, each of which can act on this model; ConfigError says why one cannot."""
    faults = faults_of(rules)
    for fault in faults:
        reason = fault.acts_on(model, tp)
        if reason is not None:
            raise ConfigError(f"{fault.rule}={fault.value} cannot act here: {reason}")
    return faults


def parse_rule(text: str) -> tuple[str, str]:
    """ "NAME=VALUE" -> (name, value), checked against the catalogue."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"a rule is NAME=VALUE, not {text!r}: for example load_bias=false")
    faults_of({name: value})
    return name, value
