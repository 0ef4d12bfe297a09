"""Whose tokens a call of a model reads: of transformers' models by the cache and the mask that go in with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


class CallInputs:
    """What `tape.step` takes of a call: ids, positions, requests and places.

    A request of transformers is a row of a batch, new with an empty cache; a cache that was seen before goes on with
    the batch that filled it. In a row that several texts are packed into each is a request.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.held: int | None = None  # how many columns the cache of the call has before its own
        self._filled: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor):
            return None
        if ids.ndim == 1:
            if "positions" not in kwargs and len(args) < 2:
                raise ValueError(
                    "ids [T] without positions: call the model with both, or with ids [batch, T]"
                )
            return ids, kwargs["positions"] if "positions" in kwargs else args[1], None
        past = kwargs.get("cache", kwargs.get("past_key_values"))  # transformers renamed it with 5.24
        mask = kwargs.get("attention_mask")
        given = [kwargs[name] for name in ("position_ids", "cache_position") if kwargs.get(name) is not None]
        start = 0 if past is None else int(past.get_seq_length())
        held = self.held = start if past is None else _held(past)
        batch = self._batch(past, start if held is None else held)
        real = torch.ones(ids.shape, dtype=torch.long)
        if isinstance(mask, Tensor) and mask.ndim == 2:  # a static cache gives a dict of whole masks
            real = mask[:, -ids.shape[1] :].cpu()
        positions = given[0] if given else start
        if not (start if held is None else held):
            packed = _packed(positions, kwargs.get("cu_seq_lens_q"), real)
            if packed is not None:
                requests = [f"{batch}.{name}" if name else "" for name in packed[0]]
                return ids, positions, requests, packed[1]
        requests = [f"{batch}.{b}" if one else "" for b, row in enumerate(real.tolist()) for one in row]
        known = held is not None and _ascending(positions, real)
        return ids, positions, requests, _places(ids.shape, mask, held) if known else None

    def _batch(self, past: Any, held: int) -> int:
        """The number of the batch whose rows a cache has; without any, of a new one."""
        self.batches += held == 0
        if past is None:
            return self.batches
        if held == 0:
            self._filled[past] = self.batches
        return self._filled.setdefault(past, self.batches)  # else it was made in the call before


class MegatronInputs:
    """Of Megatron-core's models, which take ids [batch, T], positions and a mask, and read from the beginning."""

    def __init__(self) -> None:
        self._calls = CallInputs()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        given = dict(zip(("input_ids", "position_ids"), args, strict=False))
        reported = {
            name: kwargs[name] for name in ("input_ids", "position_ids") if kwargs.get(name) is not None
        }
        packed = getattr(kwargs.get("packed_seq_params"), "cu_seqlens_q", None)
        return self._calls((), {**given, **reported, "cu_seq_lens_q": packed})


def _held(cache: Any) -> int | None:
    """How many tokens a cache has seen, by the layer that counts most: one with a window may count those that it
    keeps. None: this is no cache of layers."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return None
    reported = [0]
    for layer in layers:
        names = ("cumulative_length_int", "cumulative_length")
        counts = [int(getattr(layer, name)) for name in names if hasattr(layer, name)]
        if not counts and hasattr(layer, "get_seq_length"):
            counts = [int(layer.get_seq_length())]
        reported += counts[:1]
    return max(reported)


def _places(shape: torch.Size, mask: Any, held: int | None) -> Tensor | None:
    """How many tokens of its request each has before it, [batch, T], without padding; None where a mask of another form
    may hide some."""
    new = shape[1]
    if mask is None:
        return (held or 0) + torch.arange(new)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != (held or 0) + new:
        return None
    return (mask.long().cumsum(1) - 1).clamp_min(0)[:, -new:].cpu()


def _packed(positions: Any, starts: Any, real: Tensor) -> tuple[list[str], Tensor] | None:
    """The text of each token, "" of padding, row after row, and how many tokens of it come before, [batch, T]; None
    where no row has several. `starts` are where texts begin in the batch as one row; else they do at position 0."""
    begins, ends = torch.zeros(real.shape, dtype=torch.bool), [real.shape[1]] * len(real)
    if isinstance(starts, Tensor):
        first = starts.cpu().long()
        begins.view(-1)[first[first < real.numel()]] = True
    elif isinstance(positions, Tensor) and positions.ndim <= real.ndim:
        begins = positions.cpu().expand(real.shape) == 0
        ends = [_filled_from(row) for row in begins.tolist()]
    names, places, several = list[str](), list[int](), False
    for row, (firsts, kept) in enumerate(zip(begins.tolist(), real.tolist(), strict=True)):
        text = place = 0
        for column, first in enumerate(firsts):
            read = bool(kept[column]) and column < ends[row]
            if read and first and place:
                text, place, several = text + 1, 0, True
            names.append(f"{row}.{text}" if read else "")
            places.append(place if read else 0)
            place += read
    return (names, torch.tensor(places).view(real.shape)) if several else None


def _filled_from(begins: list[bool]) -> int:
    """Where the tokens begin that fill a row up: two or more at its end, each at position 0."""
    count = next((n for n, first in enumerate(reversed(begins)) if not first), len(begins))
    return len(begins) - (count if count > 1 else 0)


def _ascending(positions: Any, real: Tensor) -> bool:
    """Whether the positions of a call count its tokens one by one: not so where several texts are packed into a row,
    or positions have axes of their own."""
    if not isinstance(positions, Tensor):
        return True
    if positions.ndim > real.ndim:
        return False
    steps = positions.cpu().expand(real.shape).diff(dim=1)
    return bool(((steps == 1) | (real[:, 1:] == 0) | (real[:, :-1] == 0)).all())
