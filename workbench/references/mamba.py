"""transformers' Mamba-2 with taps: its own functions in torch, never a kernel, and what goes in and out.

The modelling code calls functions of its module by name; within the block they are others, which report what they saw.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

#: What one layer's Mamba-2 saw: its taps by their short names.
OnScan = Callable[[int, dict[str, Tensor]], None]

_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_CHUNKS, _STEP = "mamba2_chunk_scan", "mamba2_selective_state_update"


@contextmanager
def scanning(modules: Sequence[nn.Module], on_scan: OnScan) -> Iterator[None]:
    """Within the block, `on_scan` hears the given modules, which run one after the other."""
    with ExitStack() as stack:
        running: list[Any] = []

        def begin(module: nn.Module, _args: Any) -> None:
            running[:] = [module]

        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
        for code in {type(module).__module__ for module in modules}:
            functions = vars(sys.modules[code])
            plain = {name: inspect.unwrap(functions[name]) for name in (*_CONVOLUTIONS, _CHUNKS, _STEP)}
            heard = {
                _CHUNKS: partial(_chunks, plain[_CHUNKS], running, on_scan),
                _STEP: partial(_step, plain[_STEP], running, on_scan),
            }
            stack.callback(functions.update, {name: functions[name] for name in plain})
            functions.update(plain | heard)
        yield


def _chunks(
    scan: Callable[..., Any],
    running: Sequence[Any],
    on_scan: OnScan,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    **others: Any,
) -> Any:
    """x [1, T, H, P], dt [1, T, H], B and C [1, T, groups, N] -> what is read [1, T, H, P], perhaps the state
    [1, H, P, N] after it."""
    read, state = scan(x, dt, a, b, c, dt_bias=dt_bias, dt_limit=dt_limit, return_final_states=True, **others)
    step = F.softplus(dt + dt_bias).clamp(*dt_limit)
    rows = {"ssm_conv_x": x, "ssm_conv_b": b, "ssm_conv_c": c, "ssm_read": read}
    seen = {name: one[0].flatten(1) for name, one in rows.items()}
    on_scan(running[0].layer_idx, {**seen, "ssm_step": step[0], "ssm_state": state})
    return (read, state) if return_final_states else read


def _step(
    update: Callable[..., Tensor],
    running: Sequence[Any],
    on_scan: OnScan,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *args: Any,
    dt_bias: Tensor,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """The same of one token: x and dt [1, H, P], B and C [1, groups, N], the state in place. It has no limits of step
    sizes. `z` [1, H, P]: the gate of what is read, where there is no norm."""
    read = update(state, x, dt, a, b, c, *args, dt_bias=dt_bias, **others)
    step = F.softplus(dt[..., 0] + dt_bias[..., 0])
    rows = {"ssm_conv_x": x, "ssm_conv_b": b, "ssm_conv_c": c, "ssm_read": read}
    seen = {name: one.flatten(1) for name, one in rows.items()}
    on_scan(running[0].layer_idx, {**seen, "ssm_step": step, "ssm_state": state})
    return read if z is None else read * F.silu(z)
