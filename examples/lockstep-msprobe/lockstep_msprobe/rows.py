"""Which rows a pass of an msprobe dump has: what went into the embedding and into the rotary module shows it.

Both need the numbers; a dump of statistics alone has them where it was asked to:
`"statistics": {"tensor_list": ["embed_tokens", "rotary_emb"]}`. Else `ids.json` in the dump's folder may state what
each pass of one request read: `{"passes": [[5, 17, 101], [9], [64]]}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lockstep.sessions.meta import TokenId
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.files import read_json, shown
from lockstep.workbench.foreign.readers.pass_rows import PassRows, whole_numbers
from lockstep_msprobe.entries import Call, Measured

IDS_FILE = "ids.json"
_FORM = '{"passes": [[ids of the first pass], [of the next], …]}'


_FORM = '{"passes": [[ids of the first pass], [of the next], …]}'


class ToldIds(Struct):
    """`ids.json`."""

    passes: list[list[TokenId]]


def read_ids(path: Path) -> list[list[int]]:
    """What the user states that each pass read; nothing without the file."""
    if not path.exists():
        return []
    try:
        return msgspec.convert(read_json(path), ToldIds).passes
    except msgspec.ValidationError as error:
        raise ForeignDumpError(f"{shown(path)}: {error}; it holds {_FORM}") from error


def rows_of_pass(calls: Sequence[Call], stated: Sequence[int] | None, where: str) -> PassRows:
    """The rows of one pass. ForeignDumpError where its tokens or their positions are not in the dump."""
    embeddings = (call for call in calls if call.module.endswith("embed_tokens"))
    read = next((one for call in embeddings for one in call.inputs if one.whole), None)
    if read is None:
        raise ForeignDumpError(f"{where}: what went into embed_tokens was left out; dump its inputs too")
    ids = _values(read)
    if ids is None:
        if stated is None or len(stated) != int(np.prod(read.shape)):
            count = "x".join(str(size) for size in read.shape)
            raise ForeignDumpError(
                f"{where}: has statistics alone, so which {count} tokens went into embed_tokens is not known: dump "
                f'with "tensor_list": ["embed_tokens", "rotary_emb"], or list them in {IDS_FILE} beside the steps: '
                + _FORM
            )
        ids = np.array(stated, np.int64).reshape(read.shape)
    positions = next((found for one in _positions(calls, read) if (found := _values(one)) is not None), None)
    if positions is None:
        positions = next((found for one in _positions(calls, read) if (found := _run(one)) is not None), None)
    if positions is None:
        raise ForeignDumpError(
            f"{where}: has no positions, which go into rotary_emb: dump it too, whole where requests are packed"
        )
    if ids.ndim == 1:
        if positions.shape != ids.shape:
            raise ForeignDumpError(
                f"{where}: {ids.size} tokens, and positions of shape {list(positions.shape)}"
            )
        return PassRows.rows(ids, positions)
    masks = (one for call in calls for one in call.inputs if one.key == "input_kwargs.attention_mask")
    mask = next((found for one in masks if one.whole and (found := _values(one)) is not None), None)
    if ids.ndim != 2 or positions.ndim != 2:
        raise ForeignDumpError(f"{where}: tokens of shape {list(ids.shape)} are neither rows nor lines")
    return PassRows.lines(ids, positions, mask)


def _positions(calls: Sequence[Call], ids: Measured) -> Iterator[Measured]:
    """What may be the positions: whole numbers that went into the rotary module, or under their name into another."""
    for call in calls:
        rotary = call.module.endswith("rotary_emb")
        for one in call.inputs:
            named = one.key.endswith((".positions", ".position_ids"))
            if one.whole and (rotary or named) and len(one.shape) == len(ids.shape):
                yield one


def _values(one: Measured) -> NDArray[Any] | None:
    """Its numbers, if they were dumped."""
    if one.file is None:
        return None
    array = one.numbers()[1]
    return array if array.dtype == np.bool_ else whole_numbers(array, shown(one.file))


def _run(one: Measured) -> NDArray[np.int64] | None:
    """Positions that can only follow each other: in one line, as many as there are from the least to the largest."""
    low, high = one.statistics[0], one.statistics[1]
    count = int(np.prod(one.shape))
    if not (np.isfinite(low) and np.isfinite(high)) or count != one.shape[-1] or high - low + 1 != count:
        return None
    return np.arange(int(low), int(low) + count, dtype=np.int64).reshape(one.shape)
