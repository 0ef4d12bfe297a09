"""Mamba-2 as the metadata of GGUF files has it, and what llama.cpp's programs (`src/models/granite-hybrid.cpp`,
`nemotron-h.cpp`, `falcon-h1.cpp`, `mamba-base.cpp`) have in it alone: step sizes have no limits. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.engine.checkpoint.gguf.expert_architectures import EXPERT_KEYS, sigmoids, softmax_experts
from lockstep.engine.checkpoint.gguf.stated_sizes import Own, StatedSizes
from lockstep.engine.checkpoint.gguf.windows import by_layer
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.mamba import MambaConfig
from lockstep.engine.config.multipliers import Multipliers

#: A list: layers with a state have no key/value heads.
_KV_HEADS = "attention.head_count_kv"
#: A list in Nemotron-H: only layers of an MLP or of experts have a width.
_WIDTHS = "feed_forward_length"
_INNER, _SHARED, _LATENT = "ssm.inner_size", "expert_shared_feed_forward_length", "moe_latent_size"
#: Whether anything rotates, in Granite.
_ROTATES = "rope.scaling.finetuned"
_RMS_EPS = "attention.layer_norm_rms_epsilon"
MULTIPLIERS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
GRANITE_KEYS = (*MULTIPLIERS, *EXPERT_KEYS, _KV_HEADS)
NEMOTRON_KEYS = (*EXPERT_KEYS, _KV_HEADS, _WIDTHS)


def multipliers(fields: Fields) -> Own:
    """Granite's, of scores, embeddings, what a block adds, and logits."""
    return {
        "score_scale": fields.number("attention.scale", 0.0) or None,
        "embedding_multiplier": fields.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 0.0) or 1.0,
        "logit_divisor": fields.number("logit_scale", 1.0, above=0.0),
    }


def granite_moe(fields: Fields, of: StatedSizes) -> Own:
    """Granite with experts; one with a shared expert among all its layers of attention is another model."""
    if fields.size(_SHARED, 0, least=0):
        raise fields.error(_SHARED, "a shared expert is not supported for this architecture")
    return {**multipliers(fields), "experts": softmax_experts(fields, of, True)}


def granite_hybrid(fields: Fields, of: StatedSizes) -> Own:
    """Layers with a state or attention, an MLP behind each, or experts and a shared one."""
    attending = [count > 0 for count in by_layer(fields, _KV_HEADS, of.layers, least=0)]
    own: Own = {
        **multipliers(fields),
        "mamba": _mamba(fields, of, tuple(not one for one in attending)),
        **_biases(of, attending),
        "layer_ropes": () if fields.flag(_ROTATES, True) else (None,) * of.layers,
    }
    if not fields.size("expert_count", 0, least=0):
        return own
    experts = softmax_experts(fields, of, True)
    return {**own, "experts": replace(experts, shared_width=fields.size(_SHARED, 0, least=0))}


def nemotron_h(fields: Fields, of: StatedSizes) -> Own:
    """One block a layer: with a width it is an MLP, or experts, with key/value heads attention, else it has a state."""
    wide = [width > 0 for width in by_layer(fields, _WIDTHS, of.layers, least=0)]
    heads = by_layer(fields, _KV_HEADS, of.layers, least=0)
    states = tuple(not (one or count) for one, count in zip(wide, heads, strict=True))
    own: Own = {
        "norm": "wide",
        "gated": False,
        "activation": "relu2",
        "mamba": _mamba(fields, of, states),
        "blocks": tuple("mlp" if one else "attention" for one in wide),
        **_biases(of, [bool(count) for count in heads]),
        "mlp_bias": any(name.endswith(".ffn_down.bias") for name in of.tensors),
        "layer_ropes": (None,) * of.layers,
        **({"rms_eps": fields.number(_RMS_EPS, above=0.0)} if _RMS_EPS in fields else {}),
    }
    if not fields.size("expert_count", 0, least=0):
        return own
    if fields.size(_LATENT, 0, least=0):
        raise fields.error(_LATENT, "experts that work on latents are not supported")
    experts = sigmoids(fields, of, fields.flag("expert_weights_norm", False))
    shared = fields.size(_SHARED, 0, least=0)
    return {**own, "experts": replace(experts, shared_width=shared, wide=True)}


def falcon_h1(fields: Fields, of: StatedSizes) -> Own:
    """Attention and a state in each layer, side by side. The multipliers are in the file's weights; what is read goes
    through its gate, and behind it through a norm where the file has one."""
    mixer = _mamba(fields, of, (True,) * of.layers)
    assert mixer is not None, "every layer has one"
    normed = "blk.0.ssm_norm.weight" in of.tensors
    return {"mamba": replace(mixer, beside=True, normed=normed), "multipliers": Multipliers()}


def _biases(of: StatedSizes, attending: list[bool]) -> dict[str, bool]:
    """Those of the layers with attention, of which the first layer need not be one."""
    layers = [i for i, one in enumerate(attending) if one]
    return {
        key: any(f"blk.{i}.{module}.bias" in of.tensors for i in layers)
        for key, module in (("qkv_bias", "attn_q"), ("o_bias", "attn_output"))
    }


def _mamba(fields: Fields, of: StatedSizes, layers: tuple[bool, ...]) -> MambaConfig | None:
    """Each group of channels is normalised by itself. None where no layer has a state."""
    if not any(layers):
        return None
    heads, inner = fields.size("ssm.time_step_rank"), fields.size(_INNER)
    if inner % heads:
        raise fields.error(_INNER, f"ssm.time_step_rank = {heads} does not divide it")
    groups, first = fields.size("ssm.group_count", 1), layers.index(True)
    if inner % groups:
        raise fields.error(_INNER, f"ssm.group_count = {groups} does not divide it")
    return MambaConfig(
        heads,
        inner // heads,
        groups,
        state=fields.size("ssm.state_size"),
        conv=fields.size("ssm.conv_kernel", least=2),
        layers=layers,
        norm_width=inner // groups,
        conv_bias=f"blk.{first}.ssm_conv1d.bias" in of.tensors,
        proj_bias=f"blk.{first}.ssm_in.bias" in of.tensors,
    )
