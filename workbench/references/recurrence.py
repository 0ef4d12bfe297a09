"""transformers' linear attention with taps: its own functions in torch, never a kernel, and what goes in and out.

The modelling code calls functions of its module by name; within the block they are others, which report what they saw.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

#: What one layer's linear attention saw: its taps by their short names.
OnStates = Callable[[int, dict[str, Tensor]], None]

_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


@contextmanager
def following(modules: Sequence[nn.Module], on_states: OnStates) -> Iterator[None]:
    """Within the block, `on_states` hears the linear attention of the given modules, which run one after the other."""
    with ExitStack() as stack:
        running: list[Any] = []

        def begin(module: nn.Module, _args: Any) -> None:
            running[:] = [module]

        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
        for code in {type(module).__module__ for module in modules}:
            functions = vars(sys.modules[code])
            plain = {name: inspect.unwrap(functions[name]) for name in (*_CONVOLUTIONS, *_RULES)}
            l2 = functions["l2norm"]
            heard = {name: partial(_heard, plain[name], l2, running, on_states) for name in _RULES}
            stack.callback(functions.update, {name: functions[name] for name in plain})
            functions.update(plain | heard)
        yield


def _heard(
    rule: Callable[..., tuple[Tensor, Tensor]],
    l2: Callable[..., Tensor],
    running: Sequence[Any],
    on_states: OnStates,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Queries and keys [1, T, key_heads, D], values [1, T, heads, V], `g` and `beta` [1, T, heads] -> what is read
    [1, T, heads, V], and the state [1, heads, D, V]."""
    read, state = rule(query, key, value, g=g, beta=beta, **others)
    rows = {"conv_q": query, "conv_k": key, "conv_v": value, "delta": read}
    rows |= {f"{name}_l2": l2(x.float(), dim=-1, eps=1e-6) for name, x in (("q", query), ("k", key))}
    seen = {name: x[0].flatten(1) for name, x in rows.items()}
    on_states(running[0].layer_idx, {**seen, "beta": beta[0], "decay": g[0], "state": state})
    return read, state
