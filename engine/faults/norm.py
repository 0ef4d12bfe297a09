"""RMS normalisation: its epsilon and its weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import NormForm
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, qk_norm_by_head, qk_norm_whole, several_heads, several_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.parallel.comm import Comm


def fixed_eps(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """Ten times the usual epsilon."""
    from lockstep.engine.rules.norm import rms_norm

    return rms_norm(x, weight, 1e-5, form)


def weight_plus_one(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The weight is taken as an offset from one, as Gemma's is."""
    from lockstep.engine.rules.norm import rms_norm

    return rms_norm(x, 1 + weight, eps, form)


def weight_without_one(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The weight is applied as most models' is."""
    from lockstep.engine.rules.norm import rms_norm

    return rms_norm(x, weight, eps, "wide")


def _rms(model: ModelConfig, tp: int) -> str | None:
    return "the model's norms are LayerNorm" if model.centring else None


def _plus_one(model: ModelConfig, tp: int) -> str | None:
    return None if model.norm == "plus_one" else "the model's norms do not add 1 to their weights"


def _other_eps(model: ModelConfig, tp: int) -> str | None:
    same = math.isclose(model.rms_eps, 1e-5, rel_tol=1e-6)  # a GGUF file has it in float32
    same = same and model.latent is None  # norms of latents have their own
    return "the model's epsilon is 1e-5" if same else None


def layer_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The mean is taken off first, as LayerNorm does."""
    from lockstep.engine.rules.norm import rms_norm

    return rms_norm(x - x.mean(-1, keepdim=True), weight, eps, form)


def without_weight(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The weight is not applied."""
    import torch

    from lockstep.engine.rules.norm import rms_norm

    one = torch.zeros_like(weight) if form == "plus_one" else torch.ones_like(weight)
    return rms_norm(x, one, eps, form)


def divided_by_inverse(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """x / rsqrt(mean square): multiplied by the root instead of divided."""
    wide = x.float()
    return weight * (wide / (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def bfloat16_squares(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The mean square is taken in bfloat16."""
    import torch

    squares = x.to(torch.bfloat16).square().mean(-1, keepdim=True).float()
    return weight * (x.float() * (squares + eps).rsqrt()).to(x.dtype)


def heads_together(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """The heads of q or k are normalised as one vector."""
    from lockstep.engine.rules.norm import rms_norm

    if x.dim() < 3:
        return rms_norm(x, weight, eps, form)
    return rms_norm(x.flatten(1), weight.repeat(x.shape[1]), eps, form).view_as(x)


def heads_as_they_are(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """q and k are not normalised."""
    from lockstep.engine.rules.norm import rms_norm

    return rms_norm(x, weight, eps, form) if x.dim() < 3 else x


def own_squares(squares: Tensor, comm: Comm) -> Tensor:
    """A rank's mean is that of its own channels."""
    return squares * comm.size


def unnormed(stream: Tensor, normed: Tensor) -> Tensor:
    """The head reads the residual stream."""
    return stream


FAULTS = (
    Fault(
        id="norm-eps",
        seam="norm",
        value="eps_1e-5",
        correct="rms",
        title="RMSNorm epsilon hard-coded",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="a small error where activations are small, shrinking with depth",
        source="ggml-org/llama.cpp#2373",
        patch={"norm": fixed_eps},
        needs=all_of(_rms, _other_eps),
    ),
    Fault(
        id="norm-plus-one",
        seam="norm",
        value="plus_one",
        correct="rms",
        title="RMSNorm weight applied as 1 + w",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every channel is off by (1 + w) / w",
        source="quantumaikr/quant.cpp#23",
        patch={"norm": weight_plus_one},
        needs=_rms,
    ),
    Fault(
        id="norm-without-one",
        seam="norm",
        value="without_one",
        correct="rms",
        title="RMSNorm weight applied as w instead of 1 + w",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every channel is off by w / (1 + w): nearly zero, as Gemma's weights are",
        patch={"norm": weight_without_one},
        needs=_plus_one,
    ),
    Fault(
        id="norm-layer",
        seam="norm",
        value="mean_subtracted",
        correct="rms",
        title="LayerNorm instead of RMSNorm",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every token is off by its mean",
        patch={"norm": layer_norm},
        needs=_rms,
    ),
    Fault(
        id="norm-unweighted",
        seam="norm",
        value="unweighted",
        correct="rms",
        title="RMSNorm without its weight",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every channel is off by a factor, one over its weight",
        patch={"norm": without_weight},
        needs=_rms,
    ),
    Fault(
        id="norm-divided-by-inverse",
        seam="norm",
        value="divided",
        correct="rms",
        title="divided by rsqrt",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every token is off by a factor, its mean square",
        source="mosaicml/llm-foundry#372",
        patch={"norm": divided_by_inverse},
        needs=_rms,
    ),
    Fault(
        id="norm-low-precision",
        seam="norm",
        value="bfloat16",
        correct="rms",
        title="the mean square taken in bfloat16",
        group="norm",
        level="step",
        first_tap="layers.*.attn_norm",
        symptom="every token is off by a factor near one",
        source="pytorch/pytorch#134106",
        patch={"norm": bfloat16_squares},
        needs=_rms,
    ),
    Fault(
        id="qk-norm-over-all-heads",
        seam="norm",
        value="heads_together",
        correct="rms",
        title="q and k normalised over all heads at once",
        group="norm",
        level="step",
        first_tap="layers.*.attn.q_norm",
        symptom="each head is off by a factor of its own, another one at another tp",
        source="vllm-project/vllm#16311",
        patch={"norm": heads_together},
        needs=all_of(qk_norm_by_head, several_heads),
    ),
    Fault(
        id="qk-norm-missing",
        seam="norm",
        value="no_heads",
        correct="rms",
        title="q and k not normalised",
        group="norm",
        level="step",
        first_tap="layers.*.attn.q_norm",
        symptom="q and k go on as they were projected",
        source="paiml/aprender#1228",
        patch={"norm": heads_as_they_are},
        needs=qk_norm_by_head,
    ),
    Fault(
        id="qk-norm-on-shard",
        seam="sum_squares",
        value="own",
        correct="all_ranks",
        title="q and k normalised by the mean of a rank's own heads",
        group="norm",
        level="step",
        first_tap="layers.*.attn.q_norm",
        symptom="each rank's q and k are off by factors of their own; one rank alone is right",
        source="turboderp-org/exllamav3#141",
        patch={"sum_squares": own_squares},
        needs=all_of(qk_norm_whole, several_ranks),
    ),
    Fault(
        id="final-norm-missing",
        seam="head_input",
        value="unnormed",
        correct="normed",
        title="output head without the final norm",
        group="norm",
        level="step",
        first_tap="logits",
        symptom="the final norm is right, the logits are those of the stream before it",
        source="awslabs/keys_values#141",
        patch={"head_input": unnormed},
    ),
)
