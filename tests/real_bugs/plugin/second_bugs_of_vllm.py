"""The second fresh set of fixed bugs in vLLM's code: all written before any of them was run.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from bugs_put_back import after_init, replaced
from torch import Tensor
from torch.nn import functional as F


def generated_tokens_lost() -> None:
    """A request that was preempted is read again as its prompt alone: what it has generated is not there."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    def make(add: Any) -> Any:
        def prompt_alone(self: Any, request: Any) -> int:
            row: int = add(self, request)
            if request.num_computed_tokens < request.num_prompt_tokens:
                self.token_ids_cpu[row, request.num_prompt_tokens : request.num_tokens] = 0
            return row

        return prompt_alone

    replaced(InputBatch, "add_request", make)


def frequencies_in_bf16() -> None:
    """The frequencies are a buffer that the cast of the whole model rounds; the table is made of them."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    replaced(
        RotaryEmbeddingBase,
        "_compute_inv_freq",
        lambda compute: lambda self, base: compute(self, base).bfloat16().float(),
    )


def silu_by_a_table() -> None:
    """SiLU is looked up in a table of 16-bit floats by the argument as a 16-bit float."""
    from vllm.model_executor.layers.activation import SiluAndMul

    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    table = F.silu(every.float()).half()

    def looked_up(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return table[gate.half().view(torch.int16).long() + 2**15].to(x.dtype) * up

    SiluAndMul.forward_native = staticmethod(looked_up)


def argmax_of_a_shard() -> None:
    """The greedy token is the best of the rank's own part of the vocabulary."""
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
    from vllm.v1.sample.sampler import Sampler

    def local(logits: Tensor) -> Tensor:
        shard = pad_vocab_size(logits.shape[-1]) // get_tensor_model_parallel_world_size()
        return logits[..., :shard].argmax(-1).view(-1)

    Sampler.greedy_sample = staticmethod(local)


def mlp_of_all_ranks() -> None:
    """The layers of the MLP are not given the ranks: each has the whole MLP, and the sum over ranks follows."""
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.model_executor.models import qwen2

    def whole(layer: Any) -> Any:
        def built(*args: Any, prefix: str = "", **kwargs: Any) -> Any:
            return layer(*args, prefix=prefix, disable_tp=".mlp." in prefix, **kwargs)

        return built

    replaced(qwen2, "MergedColumnParallelLinear", whole)
    replaced(qwen2, "RowParallelLinear", whole)
    replaced(
        qwen2.Qwen2MLP,
        "forward",
        lambda forward: lambda self, x: tensor_model_parallel_all_reduce(forward(self, x)),
    )


def scaling_on_windowed_layers() -> None:
    """Layers with a window have a base of their own, but the scaling of those without."""
    from vllm.model_executor.models import gemma3

    def make(get_rope: Any) -> Any:
        def scaled(*args: Any, rope_parameters: dict[str, Any], **kwargs: Any) -> Any:
            from real_bugs_of_vllm import text_config

            scaling = text_config().rope_parameters["full_attention"]
            rope_parameters = scaling | {"rope_theta": rope_parameters["rope_theta"]}
            return get_rope(*args, rope_parameters=rope_parameters, **kwargs)

        return scaled

    replaced(gemma3, "get_rope", make)


def norm_over_all_heads() -> None:
    """Queries and keys are normalised over all heads of the rank together, not head by head."""
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    def over_heads(self: Any, *args: Any, **kwargs: Any) -> None:
        for norm in (self.q_norm, self.k_norm):

            def forward(x: Tensor, norm: Any = norm) -> Tensor:
                square = x.float().pow(2).mean((-2, -1), keepdim=True)
                return (x.float() * torch.rsqrt(square + norm.variance_epsilon)).to(x.dtype) * norm.weight

            norm.forward = forward

    after_init(Qwen3Attention, over_heads)


def residual_overwritten() -> None:
    """float() of float32 is no copy, so that the norm works in the tensor that is the residual stream too."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    def in_place(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        dtype = x.dtype
        x = x.float()
        if residual is not None:
            x.add_(residual.float())
            residual = x.to(dtype)
        square = x.pow(2).mean(-1, keepdim=True)
        x.mul_(torch.rsqrt(square + self.variance_epsilon))
        x = x.to(dtype).mul_(self.weight)
        return x if residual is None else (x, residual)

    RMSNorm.forward_native = in_place


def correction_bias_dropped() -> None:
    """The correction biases, which the loader looks for in another place, stay zeros."""
    from vllm.model_executor.models.glm4_moe import Glm4MoE, Glm4MoeForCausalLM

    def zeros(self: Any, *args: Any, **kwargs: Any) -> None:
        self.gate.e_score_correction_bias.data.zero_()

    def make(load: Any) -> Any:
        def without(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
            return load(self, ((name, x) for name, x in weights if "e_score_correction_bias" not in name))

        return without

    after_init(Glm4MoE, zeros)
    replaced(Glm4MoeForCausalLM, "load_weights", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        generated_tokens_lost, frequencies_in_bf16, silu_by_a_table, argmax_of_a_shard, mlp_of_all_ranks,
        scaling_on_windowed_layers, norm_over_all_heads, residual_overwritten, correction_bias_dropped,
    )
}  # fmt: skip


# Changes that are right


def products_in_two_halves() -> None:
    """Each product is the sum of the products of the two halves of its input."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def process(self: Any, layer: Any) -> None:
        """The weight stays as it is loaded, for no packed kernel."""

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        half = x.shape[-1] // 2
        first = F.linear(x[..., :half], layer.weight[:, :half])
        out = first + F.linear(x[..., half:], layer.weight[:, half:])
        return out if bias is None else out + bias

    UnquantizedLinearMethod.process_weights_after_loading = process
    UnquantizedLinearMethod.apply = apply


CHANGES: dict[str, Callable[[], None]] = {"products_in_two_halves": products_in_two_halves}
