"""Bugs of adapters in vLLM, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def adapter_not_scaled() -> None:
    """Alpha is not read: the factors are laid beside the weights as they are in the file."""
    from vllm.lora import lora_weights

    def optimize(self: Any) -> Any:
        return self

    for of in (lora_weights.LoRALayerWeights, lora_weights.PackedLoRALayerWeights):
        of.optimize = optimize


def adapter_by_the_first_shard() -> None:
    """Every rank takes the columns of rank 0."""
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

    def slice_lora_a(self: Any, lora_a: Any) -> Any:
        return lora_a[:, : self.input_size]

    RowParallelLinearWithLoRA.slice_lora_a = slice_lora_a


BUGS: dict[str, Callable[[], None]] = {
    "adapter_not_scaled": adapter_not_scaled,
    "adapter_by_the_first_shard": adapter_by_the_first_shard,
}
