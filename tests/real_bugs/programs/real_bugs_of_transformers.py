"""Fixed bugs of transformers, and of others in its code: REAL_BUG names which is put back before the model is made.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import fresh_bugs_of_transformers
import second_bugs_of_transformers
import third_bugs_of_transformers
import torch
import torch.distributed as dist
from fresh_bugs_of_transformers import replaced
from torch import Tensor
from transformers import PreTrainedModel, cache_utils, masking_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2


def dynamic_rope_never_reset() -> None:
    """The longest length seen is kept under a name that nobody reads, so the frequencies of a long text stay."""

    def lost(self: Any, name: str, value: Any) -> None:
        known = name == "max_seq_len_cached" and hasattr(self, "original_inv_freq")
        super(modeling_llama.LlamaRotaryEmbedding, self).__setattr__(f"None_{name}" if known else name, value)

    modeling_llama.LlamaRotaryEmbedding.__setattr__ = lost


def rope_in_bf16() -> None:
    """Positions and frequencies are multiplied in the model's dtype."""

    def low(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()

    modeling_llama.LlamaRotaryEmbedding.forward = low


def gemma_norm_rounded_early() -> None:
    """The norm is rounded to the model's dtype before it is multiplied by 1 + weight."""

    def early(self: Any, x: Tensor) -> Tensor:
        rounded: Tensor = self._norm(x.float()).type_as(x)
        return rounded * (1 + self.weight)

    modeling_gemma2.Gemma2RMSNorm.forward = early


def olmo_norm_rounded_early() -> None:
    """The norm is rounded to the model's dtype before it is multiplied by its weight."""

    def early(self: Any, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed: Tensor = self.weight * wide.to(hidden_states.dtype)
        return normed

    modeling_olmo2.Olmo2RMSNorm.forward = early


def window_lost() -> None:
    """The mask of a layer with a window is that of one without."""
    masking_utils.sliding_window_causal_mask_function = lambda window: masking_utils.causal_mask_function


def window_one_wider() -> None:
    """A window's bound counts the token itself as well: W + 1 keys are seen."""
    replaced(masking_utils, "sliding_window_overlay", lambda overlay: lambda window: overlay(window + 1))


def rolling_cache_rolls_early() -> None:
    """The cache of a window is rolled in the step that fills it, which still has room: the oldest key is lost."""

    def make(update: Any) -> Any:
        def early(
            self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if self.is_initialized and self.cumulative_length_int + keys.shape[-2] == self.max_cache_len:
                self.keys.copy_(self.keys.roll(-1, dims=-2))
                self.values.copy_(self.values.roll(-1, dims=-2))
            made: tuple[Tensor, Tensor] = update(self, keys, values, *args, **kwargs)
            return made

        return early

    replaced(cache_utils.StaticSlidingWindowLayer, "update", make)


def length_of_the_window() -> None:
    """A cache of a window returns how many keys it holds when asked how many tokens it has seen."""

    def held(self: Any) -> int:
        return int(self.keys.shape[-2]) if self.is_initialized else 0

    cache_utils.DynamicSlidingWindowLayer.get_seq_length = held


def _positions(choose: Callable[[int, int], Tensor | None]) -> None:
    """The position ids of each call of the model, as `choose(past, new)` gives."""
    call = PreTrainedModel.__call__

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, past = kwargs.get("input_ids"), kwargs.get("cache")
        if ids is not None and self.get_output_embeddings() is not None:
            chosen = choose(int(past.get_seq_length()) if past is not None else 0, ids.shape[1])
            if chosen is not None:
                kwargs["position_ids"] = chosen[None].expand(ids.shape[0], -1)
        return call(self, *args, **kwargs)

    PreTrainedModel.__call__ = __call__


def chunk_positions_without_padding() -> None:
    """The positions of a chunk are its places in the cache, whatever is padding there."""
    _positions(lambda past, new: torch.arange(past, past + new) if new > 1 else None)


def decode_at_position_zero() -> None:
    """Positions are counted from the tokens of the call alone, so that every generated token is at 0."""
    _positions(lambda past, new: torch.arange(new))


def gguf_keys_by_query_heads() -> None:
    """Rows of k are put back in order by the number of query heads."""
    from transformers import modeling_gguf_pytorch_utils as loading

    replaced(
        loading.LlamaTensorProcessor,
        "_reverse_permute_weights",
        lambda real: lambda self, weights, n_head, kv=None: real(self, weights, n_head, n_head),
    )


# Sharding


def norm_of_a_shard() -> None:
    """The norm over all heads is taken over the heads of each rank by themselves."""

    def of_shards(self: Any, x: Tensor) -> Tensor:
        wide = x.float().unflatten(-1, (dist.get_world_size(), -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide.flatten(-2)).to(x.dtype)

    init = modeling_olmo2.Olmo2Attention.__init__

    @functools.wraps(init)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for norm in (self.q_norm, self.k_norm):
            norm.forward = functools.partial(of_shards, norm)

    modeling_olmo2.Olmo2Attention.__init__ = built


def bias_on_every_rank() -> None:
    """A bias is part of what each rank puts into the sum."""
    from transformers.distributed.tensor_parallel import RowwiseParallel

    def make(transform: Any) -> Any:
        def summed(self: Any, module: Any, output: Tensor, mesh: Any) -> Tensor:
            bias = module._parameters.get("bias")
            if bias is not None:
                output = output + getattr(bias, "_local_tensor", bias)
                module._parameters["bias"] = None
            out: Tensor = transform(self, module, output, mesh)
            module._parameters["bias"] = bias
            return out

        return summed

    replaced(RowwiseParallel, "transform_output_post_forward", make)


def sum_of_a_copy() -> None:
    """The ranks' sum is made in a contiguous copy, and what is returned is the original."""
    replaced(
        dist, "all_reduce", lambda real: lambda tensor, *args, **kwargs: real(tensor.clone(), *args, **kwargs)
    )


def residual_in_the_partial() -> None:
    """Each rank adds the residual stream to its part of the sum."""

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return dist.get_world_size() * hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    modeling_llama.LlamaDecoderLayer.forward = forward


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        dynamic_rope_never_reset, rope_in_bf16, gemma_norm_rounded_early, olmo_norm_rounded_early, window_lost,
        window_one_wider, rolling_cache_rolls_early, length_of_the_window, chunk_positions_without_padding,
        decode_at_position_zero, gguf_keys_by_query_heads, norm_of_a_shard, bias_on_every_rank, sum_of_a_copy,
        residual_in_the_partial,
    )
}  # fmt: skip
for later in (fresh_bugs_of_transformers, second_bugs_of_transformers, third_bugs_of_transformers):
    BUGS |= later.BUGS
CHANGES = second_bugs_of_transformers.CHANGES | third_bugs_of_transformers.CHANGES
