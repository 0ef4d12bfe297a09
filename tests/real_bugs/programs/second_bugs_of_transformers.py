"""The second fresh set of fixed bugs, of transformers and of others in its code: all written before any was run.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fresh_bugs_of_transformers import replaced
from torch import Tensor
from torch.nn import functional as F
from transformers import cache_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_moe import modeling_qwen3_moe

# Caches


def short_chunk_not_kept() -> None:
    """Of a chunk with fewer tokens than a convolution looks back the rows are not kept: older ones stay in place."""

    def make(update: Any) -> Any:
        def kept(self: Any, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
            behind = self.has_previous_state[state_idx] and 1 < conv_states.shape[-1] < 3
            before = self.conv_states[state_idx].clone() if behind else None
            out: Tensor = update(self, conv_states, state_idx, **kwargs)
            if before is not None:
                self.conv_states[state_idx].copy_(before)
            return out

        return kept

    replaced(cache_utils.LinearAttentionLayer, "update_conv_state", make)


def chunk_overwrites_the_ring() -> None:
    """A windowed cache is a ring of two windows: a chunk of that size overwrites what its first tokens still see."""

    def make_update(update: Any) -> Any:
        def ring(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = update(self, *args, **kwargs)
            first = max(args[0].shape[-2], 2 * self.sliding_window)
            return keys[:, :, -first:], values[:, :, -first:]

        return ring

    def make_sizes(sizes: Any) -> Any:
        def ring(self: Any, query_length: int) -> tuple[int, int]:
            length, offset = sizes(self, query_length)
            left = min(length, max(query_length, 2 * self.sliding_window))
            return left, offset + length - left

        return ring

    replaced(cache_utils.DynamicSlidingWindowLayer, "update", make_update)
    replaced(cache_utils.DynamicSlidingWindowLayer, "get_mask_sizes", make_sizes)


def values_are_keys() -> None:
    """Layers without a window take the path of latent attention, where values are read from the keys' cache."""

    def make(update: Any) -> Any:
        def shared(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = update(self, *args, **kwargs)
            return keys, keys if type(self) is cache_utils.DynamicLayer else values

        return shared

    replaced(cache_utils.DynamicLayer, "update", make)


def padding_attended() -> None:
    """The mask is made for all layers' caches at once, and so without any cache's padding."""
    replaced(
        modeling_qwen3,
        "create_causal_mask",
        lambda create: lambda **kwargs: create(**(kwargs | {"attention_mask": None, "position_ids": None})),
    )


# Linear attention


def _delta_rules(make: Callable[[Any], Any]) -> None:
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        replaced(modeling_qwen3_5, name, make)


def value_heads_past_keys() -> None:
    """There are as many heads as key heads: value heads behind them are never computed."""

    def make(rule: Any) -> Any:
        def symmetric(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            heads, rest = key.shape[2], value.shape[2] - key.shape[2]
            state = None if initial_state is None else initial_state[:, :heads]
            out, left = rule(
                query, key, value[:, :, :heads], g=g[:, :, :heads], beta=beta[:, :, :heads], initial_state=state,
                **kwargs,
            )  # fmt: skip
            return F.pad(out, (0, 0, 0, rest)), None if left is None else F.pad(left, (0, 0, 0, 0, 0, rest))

        return symmetric

    _delta_rules(make)


def l2norm_in_bf16() -> None:
    """Queries and keys are normalised in the activations' dtype."""

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    def make(rule: Any) -> Any:
        def low(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            return rule(unit(query), unit(key), *args, **(kwargs | {"use_qk_l2norm_in_kernel": False}))

        return low

    _delta_rules(make)


def decay_in_bf16() -> None:
    """The factor by which the state decays is computed in float32 and cast to the activations' dtype."""

    def make(rule: Any) -> Any:
        def low(*args: Any, g: Tensor, **kwargs: Any) -> Any:
            return rule(*args, g=g.exp().bfloat16().float().log(), **kwargs)

        return low

    _delta_rules(make)


# Experts and latents


def expert_bias_unweighted() -> None:
    """The bias of an expert's down projection is added once the weight of the expert is in."""

    def make(forward: Any) -> Any:
        def unweighted(self: Any, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            out: Tensor = forward(self, hidden_states, indices, weights)
            return out + ((1 - weights)[..., None] * self.down_proj_bias[indices]).sum(1)

        return unweighted

    replaced(modeling_gpt_oss.GptOssExperts, "forward", make)


def halves_for_pairs() -> None:
    """The rotated part of latent attention is rotated by halves, where its channels lie in pairs."""
    modeling_glm4_moe_lite.apply_rotary_pos_emb_interleave = modeling_glm4_moe_lite.apply_rotary_pos_emb


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        short_chunk_not_kept, chunk_overwrites_the_ring, values_are_keys, padding_attended, value_heads_past_keys,
        l2norm_in_bf16, decay_in_bf16, expert_bias_unweighted, halves_for_pairs,
    )
}  # fmt: skip


# Changes that are right


def silu_in_float32() -> None:
    """silu(gate) is not rounded before it is multiplied by up."""

    def high(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj((F.silu(gate.float()) * up.float()).to(x.dtype))
        return out

    modeling_llama.LlamaMLP.forward = high


def experts_summed_in_float32() -> None:
    """The experts' weighted outputs are added up in float32 and rounded once."""

    def high(self: Any, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in indices.unique().tolist():
            rows, slots = (indices == expert).nonzero(as_tuple=True)
            gate, up = F.linear(hidden_states[rows], self.gate_up_proj[expert]).chunk(2, -1)
            out = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            total.index_add_(0, rows, out.float() * weights[rows, slots, None].float())
        return total.to(hidden_states.dtype)

    modeling_qwen3_moe.Qwen3MoeExperts.forward = high


def softmax_in_blocks() -> None:
    """Attention goes over its keys in blocks of four, with a running maximum and sum."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
        softcap: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        best = torch.full((*query.shape[:-1], 1), -1e30)
        total, mixed = torch.zeros_like(best), torch.zeros_like(query)
        for at in range(0, key.shape[2], 4):
            scores = query @ key[:, :, at : at + 4].transpose(2, 3) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if attention_mask is not None:
                scores = scores + attention_mask[..., at : at + 4]
            higher = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights, old = torch.exp(scores - higher), torch.exp(best - higher)
            mixed = mixed * old + weights @ value[:, :, at : at + 4]
            total, best = total * old + weights.sum(-1, keepdim=True), higher
        return (mixed / total).transpose(1, 2).contiguous(), None

    modeling_gemma2.eager_attention_forward = attention


CHANGES: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (silu_in_float32, experts_summed_in_float32, softmax_in_blocks)
}
