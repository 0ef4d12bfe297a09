"""transformers' short convolutions (LFM2) with taps: what its functions in torch, never a kernel, are given and give.

The modelling code calls functions of its module by name; within the block they are others, which report what they saw.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

#: What one layer's convolution saw: its taps by their short names.
OnConvolution = Callable[[int, dict[str, Tensor]], None]

_FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


@contextmanager
def convolving(modules: Sequence[nn.Module], on_convolution: OnConvolution) -> Iterator[None]:
    """Within the block, `on_convolution` hears the given modules, which run one after the other."""
    with ExitStack() as stack:
        running: list[Any] = []

        def begin(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            running[:] = module, kwargs["hidden_states"].shape[1]

        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
        for code in {type(module).__module__ for module in modules}:
            functions = vars(sys.modules[code])
            plain = {name: inspect.unwrap(functions[name]) for name in _FUNCTIONS}
            stack.callback(functions.update, {name: functions[name] for name in plain})
            functions.update({name: partial(_heard, plain[name], running, on_convolution) for name in plain})
        yield


def _heard(
    function: Callable[..., Tensor],
    running: Sequence[Any],
    on_convolution: OnConvolution,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """x [1, channels, T], behind rows of earlier passes or not -> as many."""
    out = function(x, *args, **kwargs)
    module, new = running
    seen = {"conv_in": x[0, :, -new:].mT, "conv": out[0, :, -new:].mT}
    on_convolution(module.layer_idx, seen)
    return out
