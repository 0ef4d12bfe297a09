"""The third fresh set of fixed bugs in vLLM's code: all written before any of them was run.

Each function is the code as it was before the fix, as short as it goes; what it stands for is in bugs.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from bugs_put_back import after_init, replaced
from torch import Tensor


def evicted_block_found() -> None:
    """A block that is taken for another request stays in the table of prefixes, under what it held before."""
    from vllm.v1.core.block_pool import BlockPool

    def kept(self: Any, block: Any) -> bool:
        block.reset_hash()
        return False

    BlockPool._maybe_evict_cached_block = kept


def cache_in_fp8() -> None:
    """Keys and values are stored as 8-bit floats, with factors that nobody has loaded: they are 1."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def make(update: Any) -> Any:
        def low(self: Any, layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
            key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))
            update(self, layer, key, value, *args, **kwargs)

        return low

    replaced(CPUAttentionBackendImpl, "do_kv_cache_update", make)


def shared_expert_weighted_down() -> None:
    """The shared expert is divided by the routed scaling factor, for a product that follows no longer."""
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    def divided(self: Any, *args: Any, **kwargs: Any) -> None:
        real, factor = self.shared_experts.forward, self.routed_scaling_factor
        self.shared_experts.forward = lambda x: real(x) / factor

    after_init(Glm4MoE, divided)


def embedding_scaled_twice() -> None:
    """Embeddings are multiplied by the root of their width where that has been done already."""
    from vllm.model_executor.models.gemma3 import Gemma3Model

    replaced(
        Gemma3Model,
        "embed_input_ids",
        lambda embed: lambda self, input_ids: embed(self, input_ids) * self.config.hidden_size**0.5,
    )


def last_row_of_the_vocabulary_lost() -> None:
    """Each rank has as many rows of the vocabulary as go into it by a whole division: the last is on no rank."""
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    def make(load: Any) -> Any:
        def without(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
            def cut() -> Iterable[tuple[str, Tensor]]:
                for name, weight in weights:
                    if "embed_tokens" in name or "lm_head" in name:
                        weight = weight.clone()
                        weight[-1] = 0
                    yield name, weight

            return load(self, cut())

        return without

    replaced(Qwen2ForCausalLM, "load_weights", make)


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        evicted_block_found, cache_in_fp8, shared_expert_weighted_down, embedding_scaled_twice,
        last_row_of_the_vocabulary_lost,
    )
}  # fmt: skip
