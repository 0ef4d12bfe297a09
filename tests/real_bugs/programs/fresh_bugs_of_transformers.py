"""The fresh set of fixed bugs, of transformers and of others in its code: all written before any of them was run.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, cache_utils, modeling_rope_utils
from transformers.distributed import expert_parallel
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.smollm3 import modeling_smollm3


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what was there)` in the place of an attribute."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(make(real)))


def after_init(owner: Any, change: Callable[[Any], None]) -> None:
    """Change what a class has built."""

    def make(init: Any) -> Any:
        def built(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            change(self)

        return built

    replaced(owner, "__init__", make)


def after_loading(change: Callable[[Any], None]) -> None:
    """Change a model once its weights are read."""
    real = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = real(cls, *args, **kwargs)
        change(model)
        return model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


# Caches and what lives between requests


def state_dropped_between_chunks() -> None:
    """Several tokens behind a cache start from no state, and their convolution from zeros."""
    replaced(
        modeling_qwen3_next,
        "torch_chunk_gated_delta_rule",
        lambda rule: lambda *args, **kwargs: rule(*args, **(kwargs | {"initial_state": None})),
    )

    def make(update: Any) -> Any:
        def fresh(self: Any, conv_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if conv_states.shape[-1] > 1:
                self.has_previous_state = dict.fromkeys(self.has_previous_state, False)
            return update(self, conv_states, *args, **kwargs)

        return fresh

    replaced(cache_utils.LinearAttentionLayer, "update_conv_state", make)


def padding_in_the_state() -> None:
    """Once there is a state, padding is no longer masked out of what updates it."""

    def make(create: Any) -> Any:
        def none_later(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
            if cache is not None and cache.has_previous_state():
                return None
            return create(*args, cache=cache, **kwargs)

        return none_later

    replaced(modeling_qwen3_5, "create_recurrent_attention_mask", make)


def state_of_the_last_request() -> None:
    """A request begins with the convolution's rows and the states that the one before it has left."""
    rows: dict[int, Tensor] = {}
    states: dict[int, Tensor] = {}

    def make_conv(update: Any) -> Any:
        def kept(self: Any, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if layer_idx in rows and self.get_conv_state(layer_idx) is None:
                conv_states = torch.cat([rows[layer_idx], conv_states], -1)
            out = update(self, conv_states, layer_idx, *args, **kwargs)
            rows[layer_idx] = self.layers[layer_idx].conv_states[0]
            return out

        return kept

    def make_update(update: Any) -> Any:
        def kept(self: Any, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            states[layer_idx] = recurrent_states
            return update(self, recurrent_states, layer_idx, *args, **kwargs)

        return kept

    def make_get(get: Any) -> Any:
        def left(self: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            found = get(self, layer_idx, *args, **kwargs)
            return states.get(layer_idx) if found is None else found

        return left

    replaced(cache_utils.Cache, "update_conv_state", make_conv)
    replaced(cache_utils.Cache, "update_recurrent_state", make_update)
    replaced(cache_utils.Cache, "get_recurrent_state", make_get)


def layers_one_position_ahead() -> None:
    """The first layer counts the token at hand as seen, and all layers above it rotate by one position more."""

    def make(forward: Any) -> Any:
        def ahead(self: Any, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:
            if self.layer_idx and hidden_states.shape[1] == 1:
                rotary = modeling_llama.LlamaRotaryEmbedding(self.config)
                position_embeddings = rotary(hidden_states, kwargs["position_ids"] + 1)
            return forward(self, hidden_states, position_embeddings=position_embeddings, **kwargs)

        return ahead

    replaced(modeling_llama.LlamaAttention, "forward", make)


def qk_norm_missing_in_decode() -> None:
    """The path of a single token does not normalise queries and keys."""

    def skipping(self: Any) -> None:
        for norm in (self.q_norm, self.k_norm):
            real = norm.forward
            norm.forward = lambda x, real=real: x if x.shape[1] == 1 else real(x)

    after_init(modeling_qwen3.Qwen3Attention, skipping)


# Precision


def state_in_bf16() -> None:
    """The state of linear attention is kept in the activations' dtype."""

    def make(update: Any) -> Any:
        def low(self: Any, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return update(self, recurrent_states.bfloat16().float(), *args, **kwargs)

        return low

    replaced(cache_utils.Cache, "update_recurrent_state", make)


def normalizer_in_float32() -> None:
    """The root that embeddings are multiplied by is not rounded to the model's dtype."""

    def high(self: Any, input_ids: Tensor) -> Tensor:
        found = F.embedding(input_ids, self.weight)
        return (found.float() * self.scalar_embed_scale).to(found.dtype)

    modeling_gemma2.Gemma2TextScaledWordEmbedding.forward = high


def inverse_root_in_bf16() -> None:
    """The reciprocal of the root mean square is rounded before it is multiplied with."""

    def low(self: Any, hidden_states: Tensor) -> Tensor:
        square = hidden_states.float().pow(2).mean(-1, keepdim=True)
        inverse = torch.rsqrt(square + self.variance_epsilon).to(hidden_states.dtype)
        normed: Tensor = self.weight * (hidden_states * inverse)
        return normed

    modeling_llama.LlamaRMSNorm.forward = low


def _deepseek_router(masked: float, scored: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.view(-1, self.hidden_dim)
        logits = F.linear(x.float(), self.weight.float())
        scores = scored(logits.sigmoid())
        groups = (scores + self.e_score_correction_bias).unflatten(-1, (self.num_group, -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(self.topk_group, -1)[1]
        kept = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1).bool()
        ids = groups.masked_fill(~kept[..., None], masked).flatten(1).topk(self.top_k, -1, sorted=False)[1]
        weights = scores.gather(1, ids)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, ids

    modeling_deepseek_v3.DeepseekV3TopkRouter.forward = forward


def scores_in_bf16() -> None:
    """The router's scores are rounded to the model's dtype before experts are chosen."""
    _deepseek_router(float("-inf"), lambda scores: scores.bfloat16().float())


# Experts


def masked_groups_at_zero() -> None:
    """Experts of groups that are out count as 0, which is above those that their biases make negative."""
    _deepseek_router(0.0, lambda scores: scores)


def shared_gate_left_out() -> None:
    """The shared expert's gate is loaded and never applied."""

    def ungated(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, 1)
        _, weights, ids = self.gate(x)
        out: Tensor = self.experts(x, ids, weights) + self.shared_expert(x)
        return out.view_as(hidden_states)

    modeling_qwen2_moe.Qwen2MoeSparseMoeBlock.forward = ungated


def router_without_its_bias() -> None:
    """The router has no bias, and the weights of the chosen experts are those among all of them."""

    def plain(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states, self.weight)
        weights, ids = logits.softmax(-1).topk(self.top_k, -1)
        return logits, weights, ids

    modeling_gpt_oss.GptOssTopKRouter.forward = plain


# Sharding


def bias_of_rank_0() -> None:
    """A bias that was gathered is copied into each rank's part from its first element on."""

    def truncated(model: Any) -> None:
        for name, bias in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
                whole = bias.full_tensor()
                bias.to_local().data.copy_(whole[: bias.to_local().shape[0]])

    after_loading(truncated)


def gates_cut_at_the_midpoint() -> None:
    """The matrix of beta and alpha, head by head, is cut as if all of beta came before all of alpha."""

    def scrambled(model: Any) -> None:
        for name, weight in model.named_parameters():
            if name.endswith("in_proj_ba.weight"):
                parts, rank = weight.full_tensor().chunk(2), dist.get_rank()
                weight.to_local().data.copy_(torch.cat([half.chunk(2)[rank] for half in parts]))

    after_loading(scrambled)


def later_experts_are_zero() -> None:
    """The experts of a rank whose first is not expert 0 give zeros."""

    def silent(self: Any) -> None:
        if self.ep_mesh.get_local_rank() > 0:
            self.experts_forward = lambda hidden_states, ids, weights: torch.zeros_like(hidden_states)

    after_init(expert_parallel.EPImplementation, silent)


# Latent attention


def mscale_left_out() -> None:
    """YaRN's factor is on the rotated part alone, not on the scores."""
    modeling_deepseek_v2.yarn_apply_mscale = lambda rope_parameters, scaling: scaling


def scale_of_the_latent() -> None:
    """Scores are scaled by the width of the absorbed keys, which are the latent and the rotated part."""

    def absorbed(self: Any) -> None:
        self.scaling = (self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5

    after_init(modeling_glm4_moe_lite.Glm4MoeLiteAttention, absorbed)


# Positions


def rope_twice() -> None:
    """Queries and keys are rotated by the model, and by the attention backend once more."""
    replaced(
        modeling_gpt_oss,
        "apply_rotary_pos_emb",
        lambda rotate: lambda q, k, cos, sin: rotate(*rotate(q, k, cos, sin), cos, sin),
    )


def yarn_range_rounded() -> None:
    """The bounds of YaRN's ramp are rounded to whole channels, whatever `truncate` states."""

    def make(compute: Any) -> Any:
        def rounded(config: Any, *args: Any, **kwargs: Any) -> Any:
            config = copy.deepcopy(config)
            config.rope_parameters = config.rope_parameters | {"truncate": True}
            return compute(config, *args, **kwargs)

        return rounded

    functions = modeling_rope_utils.ROPE_INIT_FUNCTIONS
    functions["yarn"] = make(functions["yarn"])


def rope_on_every_layer() -> None:
    """Layers that have no rotation are rotated as the others are."""
    after_init(modeling_smollm3.SmolLM3Attention, lambda self: setattr(self, "use_rope", 1))


def global_base_in_windows() -> None:
    """Layers with a window are rotated by the frequencies of those without."""
    replaced(
        modeling_gemma3.Gemma3RotaryEmbedding,
        "forward",
        lambda forward: (
            lambda self, x, position_ids, layer_type: forward(self, x, position_ids, "full_attention")
        ),
    )


# Functions and weights


def eps_of_the_first_llama() -> None:
    """The epsilon of norms is 1e-6, whatever the config states."""
    after_init(modeling_llama.LlamaRMSNorm, lambda self: setattr(self, "variance_epsilon", 1e-6))


def head_of_the_embedding() -> None:
    """The head is the embedding, though the checkpoint has a head of its own."""

    def tied(model: Any) -> None:
        model.lm_head.weight = model.get_input_embeddings().weight

    after_loading(tied)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        state_dropped_between_chunks, padding_in_the_state, state_of_the_last_request, layers_one_position_ahead,
        qk_norm_missing_in_decode, state_in_bf16, normalizer_in_float32, inverse_root_in_bf16, scores_in_bf16,
        masked_groups_at_zero, shared_gate_left_out, router_without_its_bias, bias_of_rank_0,
        gates_cut_at_the_midpoint, later_experts_are_zero, mscale_left_out, scale_of_the_latent, rope_twice,
        yarn_range_rounded, rope_on_every_layer, global_base_in_windows, eps_of_the_first_llama,
        head_of_the_embedding,
    )
}  # fmt: skip
