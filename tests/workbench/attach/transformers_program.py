"""A program that uses transformers as anyone would: MODEL IDS [tp|ep [BUG]], greedy tokens to stdout. `tp`: torchrun's
ranks, `ep` the same with whole experts on each; BUG: what is wrong in its second layer, in its experts, or at its
end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations import accelerate


def _norm_without_one(model: Any) -> None:
    model.model.layers[1].pre_feedforward_layernorm.weight.data -= 1


def _no_cap_of_scores(model: Any) -> None:
    model.model.layers[1].self_attn.attn_logit_softcapping = None


def _no_residual_multiplier(model: Any) -> None:
    model.model.layers[1].residual_multiplier = 1.0


def _a_rank_s_term_is_lost(model: Any) -> None:
    """The last rank's part of the sum is zero."""
    weight = model.model.layers[1].mlp.down_proj.weight
    if int(os.environ.get("RANK", "0")) == 1:
        getattr(weight, "_local_tensor", weight).data.zero_()


def _no_norm_of_latents(model: Any) -> None:
    model.model.layers[1].self_attn.kv_a_layernorm.forward = lambda x: x


def _no_mscale(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.scaling = attention.qk_head_dim**-0.5


def _mixtures(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def _weights_scaled_twice(model: Any) -> None:
    for mlp in _mixtures(model):
        by = mlp.gate.routed_scaling_factor
        mlp.experts.register_forward_pre_hook(lambda _, args, by=by: (args[0], args[1], args[2] * by))


def _a_rank_s_experts_are_lost(model: Any) -> None:
    """What the last rank has of the experts is zero."""
    for mlp in _mixtures(model):
        weight = mlp.experts.down_proj
        if int(os.environ.get("RANK", "0")) == 1:
            getattr(weight, "_local_tensor", weight).data.zero_()


def _experts_of_the_other_rank(model: Any) -> None:
    """Each of two ranks has what belongs to the other one."""
    for mlp in _mixtures(model):
        for weight in mlp.experts.parameters():
            own = getattr(weight, "_local_tensor", weight).data
            both = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(both, own.contiguous())
            own.copy_(both[1 - dist.get_rank()])


def _the_sum_is_doubled(model: Any) -> None:
    """As by an all-reduce of what has been reduced."""
    for mlp in _mixtures(model):
        mlp.register_forward_hook(lambda _, args, out: 2 * out)


def _the_bias_of_experts_on_every_rank(model: Any) -> None:
    """Of gpt-oss's down projection: once more in the sum for the second of two ranks."""
    for mlp in _mixtures(model):
        own = getattr(mlp.experts.down_proj_bias, "_local_tensor", mlp.experts.down_proj_bias).data
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own.contiguous())
        bias, routed = torch.cat(parts), dict[str, Any]()
        mlp.router.register_forward_hook(lambda _, args, out, routed=routed: routed.update(last=out))

        def biased(_: Any, args: Any, out: Any, bias: Any = bias, routed: Any = routed) -> Any:
            weights, ids = routed["last"][1:]
            again = (weights[..., None] * bias[ids]).sum(1)
            return out[0] + again.view_as(out[0]), *out[1:]

        mlp.register_forward_hook(biased)


BUGS: dict[str, Callable[[Any], None]] = {
    "norm_without_one": _norm_without_one,
    "no_cap_of_scores": _no_cap_of_scores,
    "no_residual_multiplier": _no_residual_multiplier,
    "a_rank_s_term_is_lost": _a_rank_s_term_is_lost,
    "no_norm_of_latents": _no_norm_of_latents,
    "no_mscale": _no_mscale,
    "weights_scaled_twice": _weights_scaled_twice,
    "a_rank_s_experts_are_lost": _a_rank_s_experts_are_lost,
    "experts_of_the_other_rank": _experts_of_the_other_rank,
    "the_sum_is_doubled": _the_sum_is_doubled,
    "the_bias_of_experts_on_every_rank": _the_bias_of_experts_on_every_rank,
}


def main() -> None:
    path, ids, *how = sys.argv[1:]
    # Asked for before a model is put on a device, but on a CPU nothing of it is used.
    accelerate.is_accelerate_available = lambda: True
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options = {}
    if how[:1] in (["tp"], ["ep"]):
        whole_experts = {"ep_size": ranks} if how[0] == "ep" else {}
        options = {"distributed_config": DistributedConfig(tp_size=ranks, **whole_experts)}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    for bug in how[1:]:
        BUGS[bug](model)
    prompt = torch.tensor([[int(token) for token in ids.split(",")]])
    print("tokens", model.generate(prompt, max_new_tokens=4, do_sample=False)[0].tolist())


if __name__ == "__main__":
    main()
