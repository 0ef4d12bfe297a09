"""The fresh set of fixed bugs in vLLM's code: all written before any of them was run.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bugs_put_back import after_init, replaced
from torch import Tensor


def keys_of_the_whole_prompt() -> None:
    """A chunk attends to as many keys as the whole prompt will have."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def make(prepare: Any) -> Any:
        def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = prepare(self, *args, **kwargs)
            count = self.input_batch.num_reqs
            prompts = self.input_batch.num_prompt_tokens_cpu_tensor[:count].to(self.seq_lens.dtype)
            self.seq_lens[:count] = torch.maximum(self.seq_lens[:count], prompts)
            return made

        return whole

    replaced(GPUModelRunner, "_prepare_inputs", make)


def groups_by_their_best() -> None:
    """With a correction bias too a group counts by its best expert, not by its two best."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def topk(gating_output: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        scores = gating_output.float().sigmoid()
        groups = (scores + how["e_score_correction_bias"]).unflatten(-1, (how["num_expert_group"], -1))
        best = groups.max(-1).values.topk(how["topk_group"], -1)[1]
        kept = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1).bool()
        ids = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1).topk(how["topk"], -1)[1]
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) if how["renormalize"] else weights
        return weights * how["routed_scaling_factor"], ids.to(torch.int32)

    cpu_router._grouped_topk = topk


def sigmoid_for_softmax() -> None:
    """The field that states how experts are scored is never read: it is a sigmoid of each."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def topk(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights, ids = router_logits.float().sigmoid().topk(top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
        return weights, ids.to(torch.int32)

    cpu_router._softmax_topk = topk


def shard_of_rank_0() -> None:
    """The rank is a keyword that nobody passes: every rank loads the first part of q, k, v, gate and up."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        self.tp_rank = 0
        for parameter in self.parameters():
            if hasattr(parameter, "tp_rank"):
                parameter.tp_rank = 0

    for owner in (MergedColumnParallelLinear, QKVParallelLinear):
        after_init(owner, first)


def scale_by_head_dim() -> None:
    """Scores are scaled by the width of a head, whatever scalar the config has."""
    from vllm.model_executor.models import gemma2

    def make(attention: Any) -> Any:
        def built(num_heads: int, head_dim: int, scale: float, **kwargs: Any) -> Any:
            return attention(num_heads, head_dim, head_dim**-0.5, **kwargs)

        return built

    replaced(gemma2, "Attention", make)


def square_not_transposed() -> None:
    """Whether a weight is to be transposed is decided by its shape, which a square one has either way."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def make(process: Any) -> Any:
        def by_shape(self: Any, layer: Any) -> None:
            if layer.weight.shape[0] == layer.weight.shape[1]:
                layer.weight.data = layer.weight.data.t().contiguous()
            process(self, layer)

        return by_shape

    replaced(UnquantizedLinearMethod, "process_weights_after_loading", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        keys_of_the_whole_prompt, groups_by_their_best, sigmoid_for_softmax, shard_of_rank_0, scale_by_head_dim,
        square_not_transposed,
    )
}  # fmt: skip
