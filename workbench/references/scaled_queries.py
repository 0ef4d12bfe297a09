"""transformers' attention whose queries are scaled behind the rotation (Ministral-3, Mistral 4): the rotated queries,
which no module and no attention interface shows.

The modelling code calls the rotation by name; within the block that reports what it gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: Of a layer's attention the rotated queries [T, heads, D].
OnRotated = Callable[[int, Tensor], None]

_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


def scales_queries(attention: Any) -> bool:
    """Whether that attention multiplies its queries by a factor of their position."""
    return hasattr(sys.modules[type(attention).__module__], "get_llama_4_attn_scale")


@contextmanager
def rotating(modules: Sequence[Any], on_rotated: OnRotated) -> Iterator[None]:
    """Within the block, `on_rotated` hears those of the given modules that scale their queries, which run one after the
    other."""
    scaling = [module for module in modules if scales_queries(module)]
    with ExitStack() as stack:
        running: list[Any] = []  # the module, and what its queries are before the rotation

        def begin(module: nn.Module, _args: Any) -> None:
            running[:] = [module]

        def projected(_module: nn.Module, _args: Any, output: Tensor) -> None:
            running[1:] = [output]

        for module in scaling:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            last = getattr(module, "q_b_proj", None) or module.q_proj
            stack.callback(last.register_forward_hook(projected).remove)
        for code in {type(module).__module__ for module in scaling}:
            functions = vars(sys.modules[code])
            plain = {name: functions[name] for name in _ROTATIONS if name in functions}
            stack.callback(functions.update, plain)
            functions.update({name: partial(_heard, one, running, on_rotated) for name, one in plain.items()})
        yield


def _heard(
    rotate: Callable[..., tuple[Tensor, Tensor]], running: Sequence[Any], on_rotated: OnRotated, *args: Any
) -> tuple[Tensor, Tensor]:
    """Queries [1, heads, T, D], or of latent attention the channels of them that are rotated."""
    queries, keys = rotate(*args)
    module, projected = running
    rotated = queries[0].transpose(0, 1)
    if hasattr(module, "kv_lora_rank"):
        heads = projected[0].unflatten(-1, (-1, module.qk_head_dim))
        rotated = torch.cat((heads[..., : module.qk_nope_head_dim], in_pairs(rotated, module)), -1)
    on_rotated(module.layer_idx, rotated)
    return queries, keys


def in_pairs(x: Tensor, attention: Any) -> Tensor:
    """[N, heads, D] of latent attention, whose last channels were rotated, in the order that the checkpoint has them:
    where neighbours are rotated together first ones of all pairs come before second ones in transformers."""
    if not (getattr(attention.config, "rope_interleave", False) or hasattr(attention, "indexer")):
        return x
    rotated = attention.qk_rope_head_dim
    pairs = x[..., -rotated:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((x[..., :-rotated], pairs), -1)
