"""transformers' eager experts with taps: the same operations in the same order, so the same bits.

Slots are put into the order of the experts' numbers, as engines' taps have them: routers give them in that of the
scores, or in none. An expert's term is added to its token's sum in the order of the experts either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "lockstep_eager"

#: What one layer's experts saw: the taps `mlp.experts.*` by their short names.
OnExperts = Callable[[dict[str, Tensor]], None]

_listeners: dict[int, OnExperts] = {}  # by id of the module of experts


def in_order(ids: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """ids [T, S] ascending, and the others [T, S, …] alike."""
    order = ids.argsort(-1)
    return ids.gather(-1, order), *(one.gather(-1, order) for one in others)


def _eager_with_taps(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], ids and weights [T, S] -> the weighted sum of what the experts give, [T, H]."""
    listener = _listeners.get(id(module))
    (ordered,) = in_order(ids)
    total, seen = torch.zeros_like(hidden), dict[str, Tensor]()

    def note(name: str, rows: Tensor, at: tuple[Tensor, ...]) -> None:
        if listener is not None:
            if name not in seen:
                seen[name] = rows.new_zeros(*ids.shape, rows.shape[-1])
            seen[name][at] = rows

    for expert in ids.unique().tolist():
        slots, tokens = torch.where((ids == expert).T)  # as transformers lists them: slot by slot
        at = (tokens, (ordered[tokens] == expert).nonzero()[:, 1])
        if module.has_gate:
            gate_up = _product(module, "gate_up_proj", expert, hidden[tokens])
            gate, up = _halves(module, gate_up)
            note("gate", gate, at)
            act = module._apply_gate(gate_up)
        else:
            up = _product(module, "up_proj", expert, hidden[tokens])
            act = module.act_fn(up)
        down = _product(module, "down_proj", expert, act)
        for name, rows in (("up", up), ("act", act), ("down", down)):
            note(name, rows, at)
        total.index_add_(0, tokens, (down * weights[tokens, slots, None]).to(total.dtype))
    if listener is not None:
        listener(seen)
    return total


def _product(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """x [N, in] through that matrix of an expert."""
    matrix = getattr(module, name)[expert]
    if not module.is_transposed:
        return nn.functional.linear(x, matrix)
    out: Tensor = x @ matrix
    return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out


def _halves(module: Any, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of what the stacked matrix gives."""
    if not module.is_concatenated:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def register() -> str:
    """Make the experts known to transformers; returns the name for `experts_implementation`."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _eager_with_taps)
    return NAME


@contextmanager
def hearing(module: nn.Module, on_experts: OnExperts) -> Iterator[None]:
    """Within the block, `on_experts` hears what the module of experts computes."""
    _listeners[id(module)] = on_experts
    try:
        yield
    finally:
        _listeners.pop(id(module), None)
