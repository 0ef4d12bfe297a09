"""A vLLM plugin that plants a bug in its Qwen2: PLANTED names which. vLLM loads it in every worker before the model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import lockstep_planted_adapters
import lockstep_planted_caches
from torch import Tensor


def register() -> None:
    bug = os.environ.get("PLANTED")
    if bug:
        (BUGS | lockstep_planted_caches.BUGS | lockstep_planted_adapters.BUGS)[bug]()


def biases_dropped() -> None:
    """The fused projection of q, k and v does not add its bias."""
    from vllm.model_executor.layers.linear import QKVParallelLinear, UnquantizedLinearMethod

    apply = UnquantizedLinearMethod.apply

    @functools.wraps(apply)
    def without_bias(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return apply(self, layer, x, None if isinstance(layer, QKVParallelLinear) else bias)

    UnquantizedLinearMethod.apply = without_bias


def rope_theta() -> None:
    """Rotary frequencies of another base."""
    from vllm.model_executor.models import qwen2

    get_rope = qwen2.get_rope

    @functools.wraps(get_rope)
    def of_ten_thousand(*args: Any, rope_parameters: dict[str, Any], **kwargs: Any) -> Any:
        return get_rope(*args, rope_parameters={**rope_parameters, "rope_theta": 10_000.0}, **kwargs)

    qwen2.get_rope = of_ten_thousand


def all_reduce_missing() -> None:
    """The down projection of layer 2 does not add up the ranks' products."""
    from vllm.model_executor.models import qwen2

    init = qwen2.Qwen2DecoderLayer.__init__

    @functools.wraps(init)
    def built(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        init(self, *args, prefix=prefix, **kwargs)
        if prefix.endswith("layers.2"):
            self.mlp.down_proj.reduce_results = False

    qwen2.Qwen2DecoderLayer.__init__ = built


def kv_heads_exchanged() -> None:
    """Keys and values are loaded with their heads in the reverse order."""
    from vllm.model_executor.models import qwen2

    load = qwen2.Qwen2ForCausalLM.load_weights

    @functools.wraps(load)
    def reversed_heads(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        heads = self.config.num_key_value_heads

        def turned() -> Iterable[tuple[str, Tensor]]:
            for name, weight in weights:
                if ".k_proj." in name or ".v_proj." in name:
                    weight = weight.unflatten(0, (heads, -1)).flip(0).flatten(0, 1)
                yield name, weight

        return load(self, turned())

    qwen2.Qwen2ForCausalLM.load_weights = reversed_heads


def residual_twice() -> None:
    """In layer 1 the attention's output has the residual in it before the norm adds that once more."""
    from vllm.model_executor.models import qwen2

    init = qwen2.Qwen2DecoderLayer.__init__

    @functools.wraps(init)
    def built(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        init(self, *args, prefix=prefix, **kwargs)
        if prefix.endswith("layers.1"):
            norm = self.post_attention_layernorm
            forward = norm.forward
            norm.forward = lambda hidden, residual: forward(hidden + residual, residual)

    qwen2.Qwen2DecoderLayer.__init__ = built


def chunks_from_zero() -> None:
    """Each chunk of a prompt counts its positions from 0 on; what comes in one pass is right."""
    from vllm.model_executor.models import qwen2

    forward = qwen2.Qwen2Attention.forward

    @functools.wraps(forward)
    def counted(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        reported = positions.tolist()
        starts = [i for i, at in enumerate(reported) if not i or at != reported[i - 1] + 1]
        positions = positions.clone()
        for start, stop in zip(starts, [*starts[1:], len(reported)], strict=True):
            if stop > start + 1:
                positions[start:stop] -= reported[start]
        result: Tensor = forward(self, positions, hidden_states)
        return result

    qwen2.Qwen2Attention.forward = counted


BUGS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        biases_dropped,
        rope_theta,
        all_reduce_missing,
        kv_heads_exchanged,
        residual_twice,
        chunks_from_zero,
    )
}
