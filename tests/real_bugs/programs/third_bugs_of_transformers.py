"""The third fresh set of fixed bugs, of transformers and of others in its code: all written before any was run.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fresh_bugs_of_transformers import after_init, after_loading, replaced
from torch import Tensor
from torch.nn import functional as F
from transformers.distributed import expert_parallel, tensor_parallel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm4 import modeling_glm4
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.llama import modeling_llama
from transformers.models.llama4 import modeling_llama4
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import configuration_qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5

# Caches


def shared_layers_rotate_too_far() -> None:
    """Layers that read another layer's cache take its length, with this pass's tokens, for their queries' position."""
    rotations: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {}

    def make_rotary(forward: Any) -> Any:
        def remembered(self: Any, x: Tensor, position_ids: Tensor, layer_type: str) -> Any:
            def further(x: Tensor) -> tuple[Tensor, ...]:
                both = forward(self, x, position_ids + position_ids.shape[1], layer_type)
                return tuple(
                    one[:, -x.shape[1] :] for one in both
                )  # of a prompt they see the last token alone

            rotations[layer_type] = further
            return forward(self, x, position_ids, layer_type)

        return remembered

    def make_attention(forward: Any) -> Any:
        def ahead(
            self: Any, hidden_states: Tensor, position_embeddings: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self.is_kv_shared_layer:
                position_embeddings = rotations[self.layer_type](hidden_states)
            return forward(self, hidden_states, position_embeddings, *args, **kwargs)

        return ahead

    replaced(modeling_gemma4.Gemma4TextRotaryEmbedding, "forward", make_rotary)
    replaced(modeling_gemma4.Gemma4TextAttention, "forward", make_attention)


def empty_slots_attended() -> None:
    """The mask of a single token is left out, as if a static cache had no slots but those that are filled."""

    def make(create: Any) -> Any:
        def without(**kwargs: Any) -> Any:
            return None if kwargs["inputs_embeds"].shape[1] == 1 else create(**kwargs)

        return without

    replaced(modeling_llama, "create_causal_mask", make)


def state_of_a_neighbour() -> None:
    """Two live sequences were handed the same slot of the convolutions' states: the last to write it wins."""

    def make(update: Any) -> Any:
        def shared(hidden_states: Tensor, conv_state: Tensor, *args: Any) -> Any:
            conv_state[1:-1] = conv_state[-1]
            return update(hidden_states, conv_state, *args)

        return shared

    replaced(modeling_lfm2, "causal_conv1d_update", make)


# Precision


def scores_in_float16() -> None:
    """The product of queries and keys is accumulated in 16-bit floats."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = (query.half() @ key.half().transpose(2, 3)).to(query.dtype) * scaling
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    modeling_glm4.eager_attention_forward = attention


def decay_rates_in_bf16() -> None:
    """The parameters of the decay, float32 in the checkpoint, are cast with all others of the model."""

    def rounded(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.data.bfloat16().to(parameter.dtype)

    after_loading(rounded)


# Sharding


def partials_in_bf16() -> None:
    """Each rank's part of a sum, accumulated in float32, is stored in bfloat16 before the ranks add up."""

    def make(transform: Any) -> Any:
        def stored(self: Any, module: Any, output: Tensor, mesh: Any) -> Any:
            return transform(self, module, output.bfloat16().to(output.dtype), mesh)

        return stored

    replaced(tensor_parallel.RowwiseParallel, "transform_output_post_forward", make)


def expert_bias_times_ranks() -> None:
    """The bias of an expert's down projection is added on every rank before the ranks' sum."""

    def everywhere(self: Any) -> None:
        real = self.experts_forward

        def biased(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            bias = real.__self__.down_proj_bias
            bias = F.pad(bias.to_local() if hasattr(bias, "to_local") else bias, (0, 0, 0, 1))
            again = (weights[..., None] * bias[ids]).sum(1).to(hidden_states.dtype)
            out: Tensor = real(hidden_states, ids, weights) + (dist.get_world_size() - 1) * again
            return out

        self.experts_forward = biased

    after_init(expert_parallel.EPImplementation, everywhere)


# Experts


def weight_on_the_output() -> None:
    """An expert's weight multiplies what the expert gives, as in other models, and not its input."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        each = self.experts(x.repeat(scores.shape[1], 1)).view(scores.shape[1], *x.shape)
        return self.shared_expert(x) + (each * scores.transpose(0, 1)[..., None]).sum(0), logits

    modeling_llama4.Llama4TextMoe.forward = forward


# Attention


def window_though_not_used() -> None:
    """The window of the config is applied, whatever use_sliding_window states."""

    def windowed(self: Any) -> None:
        written = json.loads((Path(sys.argv[1]) / "config.json").read_text())
        self.sliding_window = written["sliding_window"]
        self.layer_types = ["sliding_attention"] * self.num_hidden_layers

    replaced(
        configuration_qwen2.Qwen2Config,
        "__post_init__",
        lambda real: lambda self, **kwargs: (real(self, **kwargs), windowed(self))[0],
    )


def temperature_left_out() -> None:
    """The temperature of attention, of layers without a rotation, is off unless somebody asks for it."""
    after_init(
        modeling_llama4.Llama4TextAttention, lambda self: setattr(self, "attn_temperature_tuning", False)
    )


# Positions


def long_factors_always() -> None:
    """The long factors of LongRoPE are used at every length."""

    def long(self: Any) -> None:
        original = self.config.rope_parameters["original_max_position_embeddings"]
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](self.config, seq_len=original + 1)
        self.inv_freq.copy_(frequencies)
        self.original_inv_freq.copy_(frequencies)

    def all_of_them(model: Any) -> None:  # buffers that no file has are made again by loading
        for module in model.modules():
            if isinstance(module, modeling_phi3.Phi3RotaryEmbedding):
                long(module)

    after_loading(all_of_them)


def mscale_on_the_rotation() -> None:
    """YaRN's factor of the rotation is that of mscale_all_dim alone, not the quotient of the two."""

    def inflated(self: Any) -> None:
        rope = self.config.rope_parameters
        self.attention_scaling = modeling_deepseek_v2.yarn_get_mscale(rope["factor"], rope["mscale_all_dim"])

    after_init(modeling_deepseek_v2.DeepseekV2RotaryEmbedding, inflated)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        shared_layers_rotate_too_far, empty_slots_attended, state_of_a_neighbour, scores_in_float16,
        decay_rates_in_bf16, partials_in_bf16, expert_bias_times_ranks, weight_on_the_output, window_though_not_used,
        temperature_left_out, long_factors_always, mscale_on_the_rotation,
    )
}  # fmt: skip


# Changes that are right


def sum_not_rounded_before_its_norm() -> None:
    """The norm behind attention takes the residual stream before it is rounded, as fused kernels do."""

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        whole, norm = hidden_states.float() + attended.float(), self.post_attention_layernorm
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        out: Tensor = whole.to(hidden_states.dtype) + self.mlp(norm.weight * normed.to(hidden_states.dtype))
        return out

    modeling_llama.LlamaDecoderLayer.forward = forward


def head_in_float32() -> None:
    """The head's product is computed in float32, of weights as they are."""

    def high(model: Any) -> None:
        head = model.lm_head
        head.forward = lambda x: F.linear(x.float(), head.weight.float())

    after_loading(high)


def delta_rule_in_short_chunks() -> None:
    """The gated delta rule goes over chunks of eight tokens in place of 64."""
    replaced(
        modeling_qwen3_5,
        "torch_chunk_gated_delta_rule",
        lambda rule: lambda *args, **kwargs: rule(*args, **(kwargs | {"chunk_size": 8})),
    )


CHANGES: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (sum_not_rounded_before_its_norm, head_in_float32, delta_rule_in_short_chunks)
}
