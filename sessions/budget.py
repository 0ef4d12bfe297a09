"""Fitting a step's captured tensors into a byte budget. Everything that is cut or left out is reported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.sessions import slices
from lockstep.sessions.dtypes import widen
from lockstep.sessions.records import TensorRecord

#: Taps whose last axis is the positions attended to: they may be thinned. Nothing else is ever cut.
_ATTENTION = (".attn.scores", ".attn.probs")

Group = list[TensorRecord]  # one tap of one sequence on all ranks: kept, cut or left out together


def fit(tensors: Sequence[TensorRecord], budget_bytes: int) -> tuple[list[TensorRecord], list[str]]:
    """The tensors that fit into `budget_bytes` (before compression), and a line for each thing that was dropped.

    Each of these only while the budget is exceeded: attention rows become float16; of each attention tensor
    only the strongest positions stay, the same on every rank, so that the whole can still be rebuilt;
    whole taps are left out, the largest first.
    """
    words: list[str] = []
    groups: dict[tuple[str, int], Group] = {}
    for tensor in tensors:
        groups.setdefault((tensor.tap, tensor.seq), []).append(tensor)
    if _size(groups.values()) > budget_bytes:
        _halve(groups, words)
    if _size(groups.values()) > budget_bytes:
        _thin(groups, budget_bytes, words)
    while groups and _size(groups.values()) > budget_bytes:
        (tap, seq), group = max(groups.items(), key=lambda item: _size([item[1]]))
        words.append(f"{tap} of sequence {seq} left out ({_size([group])} bytes)")
        del groups[tap, seq]
    return [tensor for group in groups.values() for tensor in group], words


def _halve(groups: dict[tuple[str, int], Group], words: list[str]) -> None:
    """Attention in float16, except where a finite value would overflow."""
    halved = 0
    for key, group in groups.items():
        if key[0].endswith(_ATTENTION) and all(one.array.itemsize > 2 for one in group):
            with np.errstate(over="ignore"):
                arrays = [one.array.astype(np.float16) for one in group]
            if all(
                np.isinf(a).sum() == np.isinf(one.array).sum() for a, one in zip(arrays, group, strict=True)
            ):
                parts = zip(group, arrays, strict=True)
                groups[key] = [replace(one, array=array, dtype="float16") for one, array in parts]
                halved += 1
    if halved:
        words.append(f"{halved} attention tensors kept in float16")


def _thin(groups: dict[tuple[str, int], Group], budget_bytes: int, words: list[str]) -> None:
    """Every attention tensor cut to the share of its positions that there is room for, at least one."""
    attention = {
        key: group
        for key, group in groups.items()
        if key[0].endswith(_ATTENTION) and all(_has_all_positions(one) for one in group)
    }
    room = budget_bytes - _size(groups.values()) + _size(attention.values())
    share = max(0.0, room / max(1, _size(attention.values())))
    for (tap, seq), group in attention.items():
        positions = group[0].array.shape[-1]
        strongest = _strongest(group, max(1, int(share * positions)))
        groups[tap, seq] = [_pick(one, strongest) for one in group]
        words.append(f"{tap} of sequence {seq}: the {len(strongest)} strongest of {positions} positions")


def _has_all_positions(tensor: TensorRecord) -> bool:
    return bool(tensor.array.size) and len(slices.parse(tensor.slice)) < tensor.array.ndim


def _strongest(group: Group, count: int) -> list[int]:
    """The positions that get most of all rows together, of each row its largest value in any head or rank, ascending.
    NaN counts as largest."""
    arrays = [widen(one.array, one.dtype).astype(np.float32) for one in group]
    peak = np.max([array.reshape(-1, *array.shape[-2:]).max(axis=0) for array in arrays], axis=0)  # [rows, K]
    if group[0].tap.endswith(".scores") and len(peak) > 1:
        with np.errstate(invalid="ignore"):  # as much as softmax would make of them
            peak = np.exp(peak - peak.max(axis=1, keepdims=True))
    total = np.nan_to_num(peak.sum(axis=0), nan=np.inf)
    return sorted(np.argsort(-total, kind="stable")[:count].tolist())


def _pick(tensor: TensorRecord, positions: list[int]) -> TensorRecord:
    rows = [*filter(None, tensor.slice.split(","))]  # what was cut before stays cut
    part = ",".join([*rows, *[":"] * (tensor.array.ndim - 1 - len(rows)), slices.choose(positions)])
    return replace(tensor, array=np.take(tensor.array, positions, axis=-1), slice=part)


def _size(groups: Iterable[Group]) -> int:
    return sum(one.array.nbytes for group in groups for one in group)
