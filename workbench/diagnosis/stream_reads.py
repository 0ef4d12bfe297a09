"""A residual stream that is recorded right, and that all its readers read as another multiple of it.

What is wrong lies between the tap and them: an embedding that is multiplied once more outside of its module. Operation
by operation the sum has a factor, which nothing else shares, and the norm an epsilon, as its input's size is all that
the epsilon knows of. So the tap is given the size at which it is read, and all is judged again: if every reader is
right at that size, the one operation that is wrong is the one that wrote the tap.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import partial

import numpy as np

from lockstep.engine.graph import LAYER_OUTPUT
from lockstep.engine.taps.flow import inputs_of, near
from lockstep.engine.taps.names import operation_at
from lockstep.sessions.dtypes import rounded
from lockstep.workbench.diagnosis.causes import taps_in_words
from lockstep.workbench.diagnosis.hypotheses.fits import factor_of, named, resolution, simple
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.stream_scale import RestoredStream, erring

#: The taps of a stream that a layer hands on.
_STREAM = ("attn_residual", LAYER_OUTPUT)


def rescaled_reads(taps: RecordedTaps, facts: Facts, wrong: Collection[str]) -> RestoredStream | None:
    """The recording with taps of the stream as their readers read them, if that puts right all that errs of these:
    two at the least, as a factor that one has alone is its own. `wrong` are the taps of operations that err."""
    layers = facts.model.num_layers
    readers: dict[str, list[str]] = {}
    for tap in sorted(wrong):
        if operation_at(tap) is not None:
            for read in inputs_of(tap, layers):
                readers.setdefault(read, []).append(tap)
    factors, notes = {}, []
    for tap in _stream(layers):
        mine = readers.get(tap, [])
        if len(mine) < 2 or not taps.captured(tap):
            continue
        size = next(_sizes(tap, mine, taps, facts), None)
        if size is None:
            continue
        factor = _single(size, facts.dtype)
        if erring(mine, taps.scaled({tap: factor}, facts.dtype), facts):
            continue
        factors[tap] = factor
        notes.append(f"{taps_in_words(mine, layers)} read {named(size)} times what was recorded of {tap}")
    return RestoredStream(taps.scaled(factors, facts.dtype), (), "; ".join(notes)) if factors else None


def _stream(layers: int) -> Iterator[str]:
    yield "embed"
    for layer in range(layers):
        yield from (near(kind, layer, layers) for kind in _STREAM)


def _sizes(tap: str, readers: Collection[str], taps: RecordedTaps, facts: Facts) -> Iterator[float]:
    """By which number the residual sums among the readers have multiplied the stream that goes into them."""
    for reader in readers:
        for site in sites_of(reader, taps, facts):
            if not isinstance(site, Site) or site.operation != "residual" or site.deviation is None:
                continue
            stream = site.rows_of(tap)
            if stream is None or not site.parts[0].fits or stream.shape != site.seen.shape:
                continue
            read = site.seen - site.expected + stream
            value = factor_of(stream, read)
            if math.isfinite(value) and value != 0:
                yield min(_near(value, site), key=partial(_left, stream, read, facts.dtype))


def _near(value: float, site: Site) -> Iterator[float]:
    """Numbers that a fitted one may stand for: with another last bit it rounds other elements, and of a sum that nearly
    cancels one such bit is more than its noise."""
    yield simple(value, within=resolution(site))
    yield from (float(f"{value:.{digits}g}") for digits in (4, 5, 6))
    nearest = np.float32(value)
    yield from map(float, (nearest, np.nextafter(nearest, np.inf), np.nextafter(nearest, -np.inf)))


def _left(stream: Array, read: Array, dtype: str, value: float) -> float:
    """How far what was read is from the stream times a number."""
    return float(np.linalg.norm(rounded(stream * _single(value, dtype), dtype) - read))


def _single(value: float, dtype: str) -> float:
    """A number as engines multiply by it: in single precision, unless all of them are in double."""
    return value if dtype == "float64" else float(np.float32(value))
