"""Embedding, norms, feed-forward, residual stream and head of dense models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.rules import defaults
from lockstep.engine.run.runner import Runner
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

ACT = ("mlp.act",)
LOGITS = ("logits",)
FACTOR = "scal|factor|times|multipl|divi|twice|root|larg|small|number"


def in_four_bits(weight: Tensor) -> Tensor:
    """Rounded to one of 15 levels of its row, as the simplest quantisation does."""
    scale = weight.abs().amax(-1, keepdim=True) / 7
    return (weight / scale).round() * scale


def _held(p: Patched, module: Any) -> list[Tensor]:
    """What that module gave last."""
    held: list[Tensor] = []

    def hold(x: Tensor) -> Tensor:
        held[:] = [x]
        return x

    p.output(module, hold)
    return held


# -- embedding and norms -------------------------------------------------------------------------------------


@bug(
    "embedding", accepted=("embedding", "scale"), words=FACTOR, taps=("embed",), model="gemma3", dtype="bfloat16",
    tp=2, ep=1,
)  # fmt: skip
def embeddings_are_scaled_by_caller_and_model(p: Spoilt) -> None:
    """Where embeddings may come from outside (images beside text) both sides scale them (see vLLM#36787)."""
    p.rules(embedding=lambda rows, model: defaults.looked_up(defaults.looked_up(rows, model), model))


@bug(
    "norm", accepted=("norm", "skipped", "input"), words="norm|skip|left out|missing|never|without|unchanged|identity",
    taps=("post_attn_norm",), model="glm4", tp=2, ep=1,
)  # fmt: skip
def sandwich_norm_behind_attention_is_left_out(p: Spoilt) -> None:
    """GLM-4-0414 in the graph of GLM-4, which has no norms behind its blocks (llama.cpp#12957)."""

    def begin(runner: Runner) -> None:
        for layer in runner.decoder.layers:
            layer.norms["post_attn_norm"].rule = lambda x, *_: x

    p.running(begin)


@bug(
    "norm", accepted=("norm", "input", "residual"),
    words="norm|sum|residual|stream|input|read", taps=("mlp_norm",), layers=(1,),
    model="llama",
)  # fmt: skip
def second_norm_of_a_layer_reads_attention_without_the_stream(p: Patched) -> None:
    """`norm(x, residual)` whose second argument is left out: the sum is made, and not read."""
    held = _held(p, p.attn(1).o_proj)
    p.wrap(p.decoder.layers[1].post_attention_layernorm, lambda forward, x: forward(held[0]))


@bug(
    "norm", accepted=("norm", "input", "residual"),
    words="norm|sum|residual|stream|input|read", taps=("final_norm",), model="qwen3", tp=2,
)  # fmt: skip
def final_norm_reads_the_last_block_without_the_stream(p: Patched) -> None:
    """The last stage is sent hidden states and residual, and norms the first of them."""
    held = _held(p, p.mlp(len(p.decoder.layers) - 1).down_proj)
    p.wrap(p.decoder.norm, lambda forward, x: forward(held[0]))


@bug("bias", accepted=("norm", "bias"), words="norm|bias|shift|miss|zero|load|without", taps=("final_norm",),
     model="starcoder2")  # fmt: skip
def bias_of_the_final_norm_is_not_loaded(p: Patched) -> None:
    """A loader that knows `norm.weight` for the root mean square alone and passes over the rest of the prefix."""
    p.bias(p.decoder.norm, torch.zeros_like)


@bug(
    "quantisation", accepted=("norm", "precision", "overflow", "clip"),
    words="norm|satur|clamp|clip|limit|range|quant|larg|cap|bound", taps=("mlp_norm",), model="llama",
    dtype="bfloat16",
)  # fmt: skip
def fused_norm_and_quantisation_saturates_at_one(p: Patched) -> None:
    """A static input scale that is left at its initial value: all beyond it is cut off."""
    for _, layer in p.layers():
        p.output(layer.post_attention_layernorm, lambda x: x.clamp(-1, 1))


# -- feed-forward --------------------------------------------------------------------------------------------


@bug(
    "activation", accepted=("activation",), words="activ|gelu|silu", taps=ACT, model="gemma",
    dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def activation_is_the_default_of_another_family(p: Spoilt) -> None:
    """Gemma's config has hidden_activation beside hidden_act; who asks for neither has SiLU."""
    p.rules(act=lambda gate, up, activation: defaults.act_and_mul(gate, up, "silu"))


@bug(
    "activation", accepted=("activation",), words="activ|relu|squar|silu|gelu", taps=ACT, model="arcee", ep=1
)
def relu_of_a_block_without_a_gate_is_not_squared(p: Spoilt) -> None:
    """`relu2` is looked up by its first four letters."""
    p.rules(act_alone=lambda x, activation: F.relu(x))


@bug(
    "activation", accepted=("activation", "input", "gate"), words="activ|gelu|silu|gate|\\bup\\b|exchang|swap",
    taps=ACT, model="gemma2", ep=1,
)  # fmt: skip
def fused_kernel_takes_up_for_the_gate_and_has_a_silu(p: Spoilt) -> None:
    """Two mistakes at once: a kernel written for packs of up and gate, and for Llama."""
    p.rules(act=lambda gate, up, activation: defaults.act_and_mul(up, gate, "silu"))


# -- stream --------------------------------------------------------------------------------------------------


@bug(
    "residual", accepted=("residual", "scale", "multiplier"), words=FACTOR + "|residual|stream|0\\.22|whole",
    taps=("attn_residual",), step=1, model="granite", ep=1,
)  # fmt: skip
def fused_sum_of_decode_knows_no_residual_multiplier(p: Spoilt) -> None:
    """A kernel of sum and norm for few tokens, which has no room for a factor."""

    def begin(runner: Runner) -> None:
        for layer in runner.decoder.layers:
            layer.residual = p.later(layer.residual, torch.add)

    p.running(begin)


@bug(
    "residual", accepted=("residual", "scale"), words="residual|stream|sum|twice|added|double|again",
    taps=("mlp_residual",), layers=(2,), model="llama-deep", dtype="bfloat16", tp=2,
)  # fmt: skip
def state_kept_for_a_draft_model_is_summed_in_place(p: Patched) -> None:
    """`hidden += residual` to hand EAGLE-3 a layer's output: the next layer adds the residual once more."""
    p.residuals(2, mlp=lambda stream, down: stream + down + stream)


# -- head ----------------------------------------------------------------------------------------------------


@bug("logits", accepted=("head", "scale"), words=FACTOR + "|logit", taps=LOGITS, model="cohere", ep=1)
def logit_scale_divides_the_logits(p: Spoilt) -> None:
    """Granite's logits_scaling divides, Cohere's logit_scale multiplies."""
    p.rules(logits=lambda logits, model: logits * model.logit_divisor)


@bug(
    "logits", accepted=("head", "scale", "clip"), words="cap|tanh|twice|clip|limit|scal|logit|small|squash",
    taps=LOGITS, step=1, model="gemma2", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def logits_of_decode_are_capped_by_model_and_sampler(p: Spoilt) -> None:
    """The sampler's own cap is for models that have none in their head; the check looks at prefill's path."""

    def twice(logits: Tensor, model: ModelConfig) -> Tensor:
        return defaults.capped(defaults.divided_logits(logits, model), model.logit_cap)

    p.rules(logits=p.later(defaults.divided_logits, twice))


@bug(
    "quantisation", accepted=("head", "weight", "precision"),
    words="head|weight|quant|round|bit|precis|coarse|level|scale", taps=LOGITS, model="qwen2-untied",
)  # fmt: skip
def head_is_quantised_with_the_rest(p: Patched) -> None:
    """`lm_head` stands in the list of what is to be left alone, the module has a prefix before it."""
    p.weight(p.model.lm_head, in_four_bits)
