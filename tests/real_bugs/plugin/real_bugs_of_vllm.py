"""A vLLM plugin that puts a fixed bug back: REAL_BUG names which. vLLM loads it in every worker before the model.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import fresh_bugs_of_vllm
import second_bugs_of_vllm
import third_bugs_of_vllm
import torch
from bugs_put_back import after_init, replaced
from torch import Tensor
from torch.nn.functional import rms_norm


def register() -> None:
    bug = os.environ.get("REAL_BUG")
    if bug:
        (BUGS | second_bugs_of_vllm.CHANGES)[bug]()


def text_config() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().model_config.hf_text_config


# Experts


def olmoe_norm_of_a_shard() -> None:
    """Each rank normalises the heads that it has, with the first weights of the norm."""
    from vllm.model_executor.models.olmoe import OlmoeAttention

    def of_a_shard(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = [
            rms_norm(x, x.shape[-1:], norm.weight[: x.shape[-1]], norm.variance_epsilon)
            for x, norm in ((q, self.q_norm), (k, self.k_norm))
        ]
        return normed[0], normed[1]

    OlmoeAttention._apply_qk_norm = of_a_shard


def routed_scale_twice() -> None:
    """The router applies the routed scaling factor as well as the layer."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    def scaled(router: Any, *args: Any, **kwargs: Any) -> None:
        router.routed_scaling_factor = text_config().routed_scaling_factor

    after_init(CPURouter, scaled)


def weights_of_biased_scores() -> None:
    """The correction bias, meant for the choice alone, is in the experts' weights too."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def make(topk: Any) -> Any:
        def biased(gating_output: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
            _, ids = topk(gating_output=gating_output, **how)
            scores = gating_output.float().sigmoid() + how["e_score_correction_bias"]
            weights = scores.gather(1, ids.long())
            weights = weights / weights.sum(-1, keepdim=True) if how["renormalize"] else weights
            return weights * how["routed_scaling_factor"], ids

        return biased

    replaced(cpu_router, "_grouped_topk", make)


def correction_bias_in_bf16() -> None:
    """The parameter of the correction bias is created in the model's dtype, and loading rounds to it."""
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    def rounded(self: Any, *args: Any, **kwargs: Any) -> None:
        bias = self.gate.e_score_correction_bias
        bias.data = bias.data.to(torch.bfloat16)

    after_init(Glm4MoE, rounded)


def router_in_bf16() -> None:
    """The router's product is computed in the model's dtype."""
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    def low(self: Any, *args: Any, **kwargs: Any) -> None:
        real = self.gate.forward  # its weight, of this dtype in the checkpoint, is packed by the first pass
        self.gate.forward = lambda x: (real(x)[0].to(x.dtype).float(), None)

    after_init(Glm4MoE, low)


def shared_expert_reduced_twice() -> None:
    """The shared expert adds up the ranks' products before the layer does."""
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    def reducing(self: Any, *args: Any, **kwargs: Any) -> None:
        self.shared_experts.down_proj.reduce_results = True

    after_init(Glm4MoE, reducing)


def experts_reduced_twice() -> None:
    """A bare all-reduce follows the experts, whose layer has reduced already."""
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    replaced(
        Qwen3MoeSparseMoeBlock,
        "forward",
        lambda forward: lambda self, x: tensor_model_parallel_all_reduce(forward(self, x)),
    )


def top_k_not_renormalised() -> None:
    """The default routing is used, which leaves the chosen weights as the softmax gave them."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    after_init(CPURouter, lambda router, *args, **kwargs: setattr(router, "renormalize", False))


def top_k_always_renormalised() -> None:
    """The flag of renormalisation never reaches the kernel, whose default is true."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    after_init(CPURouter, lambda router, *args, **kwargs: setattr(router, "renormalize", True))


# Attention


def window_of_the_group() -> None:
    """The window of a cache group is taken for all of its layers. In the metadata alone, where the mistake was, it has
    no effect in this release, whose kernel asks each layer: the layers are given it as well."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    def of_the_spec(self: Any) -> int:
        return getattr(self.kv_cache_spec, "sliding_window", None) or -1

    def of_all_layers(builder: Any, *args: Any, **kwargs: Any) -> None:
        layers = get_layers_from_vllm_config(builder.vllm_config, Attention, builder.layer_names)
        for layer in layers.values():
            layer.impl.sliding_window = builder.window_size

    CPUAttentionMetadataBuilder._group_sliding_window = of_the_spec
    after_init(CPUAttentionMetadataBuilder, of_all_layers)


def _windows(choose: Callable[[int | None], int | None]) -> None:
    from vllm.model_executor.models import gemma3

    def make(attention: Any) -> Any:
        def built(*args: Any, per_layer_sliding_window: int | None = None, **kwargs: Any) -> Any:
            return attention(*args, per_layer_sliding_window=choose(per_layer_sliding_window), **kwargs)

        return built

    replaced(gemma3, "Attention", make)


def window_on_every_layer() -> None:
    """A layer without a window of its own falls back to the model's."""
    _windows(lambda window: window or text_config().sliding_window)


def window_on_no_layer() -> None:
    """The backend is never given the window."""
    _windows(lambda window: None)


def window_ignored_in_decode() -> None:
    """A step of single tokens attends to the whole cache."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    def make_build(build: Any) -> Any:
        def scheduled(self: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
            window = self.window_size
            self.window_size = -1 if common.max_query_len == 1 else window
            made = build(self, prefix, common, *args, **kwargs)
            self.window_size = window
            return made

        return scheduled

    def make_forward(forward: Any) -> Any:
        def attend(self: Any, *args: Any, **kwargs: Any) -> Any:
            metadata, window = (
                kwargs.get("attn_metadata", args[5] if len(args) > 5 else None),
                self.sliding_window,
            )
            if metadata is not None and metadata.max_query_len == 1:
                self.sliding_window = -1
            out = forward(self, *args, **kwargs)
            self.sliding_window = window
            return out

        return attend

    replaced(CPUAttentionMetadataBuilder, "build", make_build)
    replaced(CPUAttentionBackendImpl, "forward", make_forward)


def softcap_of_zero() -> None:
    """The cap of the scores is a constant 0 in the call of the kernel."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    after_init(CPUAttentionBackendImpl, lambda self, *args, **kwargs: setattr(self, "logits_soft_cap", 0))


def rotary_dim_halved_by_each_layer() -> None:
    """Every layer halves the rotary width of the one embedding that all of them share."""
    from vllm.model_executor.models import glm4

    def make(get_rope: Any) -> Any:
        def of_all_layers(*args: Any, rope_parameters: dict[str, Any], **kwargs: Any) -> Any:
            factor = 0.5 ** text_config().num_hidden_layers
            return get_rope(
                *args, rope_parameters=rope_parameters | {"partial_rotary_factor": factor}, **kwargs
            )

        return of_all_layers

    replaced(glm4, "get_rope", make)


def as_it_is() -> None:
    """Nothing: the bug is in this release."""


# Caches and what lives between requests


def rows_of_blocks_stay() -> None:
    """A request that moves down in the batch leaves its blocks behind, and reads those of the one before it there."""
    from vllm.v1.worker.block_table import BlockTable

    BlockTable.move_row = lambda self, src, tgt: None


def written_one_slot_too_far() -> None:
    """The length so far counts the token at hand: its key and value go one slot too far."""
    from vllm.v1.worker.block_table import BlockTable

    def make(compute: Any) -> Any:
        def shifted(self: Any, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
            positions = positions.clone()
            starts = query_start_loc[: num_reqs + 1].tolist()
            for start, end in itertools.pairwise(starts):
                if end - start == 1 and positions[start] > 0:
                    positions[start] += 1
            compute(self, num_reqs, query_start_loc, positions)

        return shifted

    replaced(BlockTable, "compute_slot_mapping", make)


# Functions and precision


def gelu_exact() -> None:
    """GELU by the error function in place of the tanh approximation."""
    from vllm.model_executor.models import gemma2

    replaced(gemma2, "GeluAndMul", lambda real: lambda approximate: real(approximate="none"))


def gemma_norm_in_bf16() -> None:
    """The norm is rounded before it is multiplied by 1 + weight, which is rounded too."""
    from vllm import ir
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    def low(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        weight = self.weight + 1.0
        if residual is None:
            return ir.ops.rms_norm(x, weight, self.variance_epsilon)
        return ir.ops.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)

    GemmaRMSNorm.forward_native = low


def norm_weight_in_float32() -> None:
    """The norm multiplies by its weight in float32, not in the weight's dtype."""
    from vllm import ir
    from vllm.model_executor.layers.layernorm import RMSNorm

    def high(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        weight = self.weight.data.float()
        if residual is None:
            return ir.ops.rms_norm(x, weight, self.variance_epsilon)
        return ir.ops.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)

    RMSNorm.forward_native = high


# Sharding


def last_layer_not_reduced() -> None:
    """The last layer leaves its all-reduce to the norm of a next one."""
    from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer

    def deferring(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        if prefix.endswith(f"layers.{text_config().num_hidden_layers - 1}"):
            self.mlp.down_proj.reduce_results = False

    after_init(Qwen2DecoderLayer, deferring)


def gate_and_up_cut_as_one() -> None:
    """The matrix of gate and up is cut into ranks as if it were one projection."""
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    def exchanged(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        waiting: dict[str, Tensor] = {}
        for name, weight in weights:
            if ".gate_proj." not in name and ".up_proj." not in name:
                yield name, weight
                continue
            waiting[name] = weight
            gate, up = (
                name.replace("gate_proj", kind).replace("up_proj", kind) for kind in ("gate_proj", "up_proj")
            )
            if gate in waiting and up in waiting:
                parts = torch.cat([waiting.pop(gate), waiting.pop(up)]).chunk(4)
                yield gate, torch.cat(parts[::2])
                yield up, torch.cat(parts[1::2])

    def make(load: Any) -> Any:
        return lambda self, weights: load(self, exchanged(weights))

    replaced(Qwen2ForCausalLM, "load_weights", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        olmoe_norm_of_a_shard, routed_scale_twice, weights_of_biased_scores, correction_bias_in_bf16, router_in_bf16,
        shared_expert_reduced_twice, experts_reduced_twice, top_k_not_renormalised, top_k_always_renormalised,
        window_of_the_group, window_on_every_layer, window_on_no_layer, window_ignored_in_decode, softcap_of_zero,
        rotary_dim_halved_by_each_layer, as_it_is, rows_of_blocks_stay, written_one_slot_too_far, gelu_exact,
        gemma_norm_in_bf16, norm_weight_in_float32, last_layer_not_reduced, gate_and_up_cut_as_one,
    )
}  # fmt: skip
for later in (fresh_bugs_of_vllm, second_bugs_of_vllm, third_bugs_of_vllm):
    BUGS |= later.BUGS
