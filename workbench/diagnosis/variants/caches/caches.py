"""What a cache may hold instead of the rows that were written to it, [K, kv_heads, D] by position: keys or values.

A cache of another length, or of other heads, is predicted in the shape that was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from lockstep.engine.taps.names import local_name, operation_at
from lockstep.workbench.diagnosis.hypotheses.blocks import history, others, scopes, shaped, usual_noise
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: Positions by which rows may be shifted, or rotated too far.
OFFSETS = tuple(offset for offset in range(-8, 9) if offset)


#: What one wrong row alone does not show, though they might give the same there.
_OF_ALL_ROWS = ("cache_rows_shifted", "cache_rows_rolled")

#: Rows among which a wrong row's source is looked for.
_POOL = 4096


def caches(site: Site) -> Iterator[Variant]:
    """Variants of one layer's cache of keys or of values on one rank."""
    for name, text, form in _SHAPES:
        guesses = [form(part.expected, _new(site, i), part.seen) for i, part in enumerate(site.parts)]
        yield cache_variant(site, name, text, guesses)
    if all(part.fits for part in site.parts):
        single = sum(int(scope.any((0, 2)).sum()) for scope in scopes(site)) == 1
        for name, text, rows in other_rows(site):
            if not (single and name in _OF_ALL_ROWS):
                yield cache_variant(site, name, text, rows)
        yield from cached_rows(site)


_WORDS = {
    "attn.k_cache": "keys", "attn.latent_cache": "latents", "attn.rope_cache": "rotated parts of keys",
    "attn.index_k_cache": "index keys",
}  # fmt: skip


def written_at(site: Site) -> str:
    """The tap of what is written to the cache, that of another layer by its whole name."""
    operation = site.declared or operation_at(site.tap)
    return "" if operation is None else operation.inputs["written"]


def cache_variant(
    site: Site,
    name: str,
    text: str,
    guesses: Sequence[Array | None],
    fitted: Mapping[str, object] | None = None,
    parameters: int = 0,
) -> Variant:
    """What is guessed where that is known and of the right shape (NaN: not known); else what was written."""
    made = []
    for guess, part in zip(guesses, site.parts, strict=True):
        if guess is None or guess.shape != part.seen.shape:
            made.append(part.expected)
        else:
            made.append(np.where(np.isnan(guess), part.expected, guess) if part.fits else guess)
    noise = usual_noise(site) if all(part.fits for part in site.parts) else None
    return Variant(name, "cache", text, fitted or {}, made, parameters, noise=noise)


def _new(site: Site, i: int) -> int:
    """The number of rows that the part's pass has written."""
    return len(site.taps.passes[site.passes[i]].rows)


def what(site: Site) -> str:
    return _WORDS.get(site.kind, "values")


def first_rows(count: int) -> str:
    return "the first row" if count == 1 else f"the first {count} rows"


# --- other lengths and heads -------------------------------------------------------------------------------

#: (name, text, what is held of the written rows, of which so many are new, where such a thing was seen)
_SHAPES: tuple[tuple[str, str, Callable[[Array, int, Array], Array]], ...] = (
    (
        "cache_not_used",
        "attention reads only this step's keys and values, not the cache",
        lambda rows, new, seen: rows[-new:],
    ),
    (
        "cache_newest_missing",
        "this step's rows are not in the cache yet: it is read before it is written",
        lambda rows, new, seen: rows[:-new] if len(rows) > new else rows,
    ),
    (
        "cache_cut_at_front",
        "only the newest rows are kept: the older ones were dropped",
        lambda rows, new, seen: rows[-len(seen) :] if len(seen) else rows[:0],
    ),
    (
        "cache_cut_at_end",
        "only the first rows are held: the cache is shorter than the sequence",
        lambda rows, new, seen: rows[: len(seen)],
    ),
    (
        "cache_zero_rows",
        "rows of zeros follow the written ones: the cache is read beyond the sequence's length",
        lambda rows, new, seen: np.concatenate(
            [rows, np.zeros((max(len(seen) - len(rows), 0), *rows.shape[1:]))]
        ),
    ),
    (
        "cache_rows_twice",
        "this step's rows are written twice",
        lambda rows, new, seen: np.concatenate([rows, rows[-new:]]),
    ),
    (
        "cache_heads_repeated",
        "each KV head is cached several times, as attention reads it",
        lambda rows, new, seen: rows.repeat(max(seen.shape[1] // rows.shape[1], 1), axis=1),
    ),
    (
        "cache_heads_repeated",
        "all KV heads are cached several times, one after the other",
        lambda rows, new, seen: np.tile(rows, (1, max(seen.shape[1] // rows.shape[1], 1), 1)),
    ),
    (
        "cache_heads_crowded",
        "each KV head is cached twice, and the last ones have no room",
        lambda rows, new, seen: rows.repeat(2, axis=1)[:, : rows.shape[1]],
    ),
    (
        "cache_heads_lost",
        "only the first KV heads are cached",
        lambda rows, new, seen: rows[:, : seen.shape[1]],
    ),
)


# --- rows from elsewhere -----------------------------------------------------------------------------------


def other_rows(site: Site) -> Iterator[tuple[str, str, list[Array | None]]]:
    """What may stand where rows should: (name, text, rows [K, kv_heads, D] of each part)."""
    rows = [part.expected for part in site.parts]
    words, other = what(site), "attn.v_proj" if site.kind == "attn.k_cache" else "attn.k_rope"
    yield "cache_rows_zero", "rows were never written: they are zero", [0 * x for x in rows]
    yield (
        "cache_newest_row",
        "rows hold the newest token's: it overwrites them",
        [np.broadcast_to(x[-1:], x.shape) for x in rows],
    )
    yield "cache_first_row", "rows hold the first token's", [np.broadcast_to(x[:1], x.shape) for x in rows]
    text = f"the cache of {words} holds {'values' if words == 'keys' else 'keys'}"
    yield (
        "cache_keys_for_values",
        text,
        [shaped(x, y) for x, y in zip(history(site, other), rows, strict=True)],
    )
    written = written_at(site)
    sharing = [layer for layer in range(site.facts.model.num_layers) if layer != site.layer]
    for read in (
        partial(history, site, local_name(written)),
        partial(others, site, site.kind),
    ):  # first by who has written them
        for layer in sharing:
            text, name = f"rows are those of layer {layer}: layers share a cache", "cache_of_another_layer"
            if site.layer is not None and layer == site.layer + 1 < site.facts.model.num_layers - 1:
                text, name = (
                    f"rows are those of layer {layer}, which writes to this layer's cache",
                    "cache_of_next_layer",
                )
            if (source := site.facts.model.kv_from) is not None and layer != source:
                text = f"the layer reads the {words} of layer {layer}, not those of layer {source}, which it shares"
                name = "cache_of_other_writer"
            yield name, text, [shaped(x, y) for x, y in zip(read(layer), rows, strict=True)]
    for rank in site.taps.ranks:
        if rank not in site.ranks:
            theirs = history(site, written, rank=rank)
            text = f"rows are those of rank {rank}"
            yield "cache_of_another_rank", text, [shaped(x, y) for x, y in zip(theirs, rows, strict=True)]
    for seq in sorted({one.seq for one in site.taps.passes}):
        text = f"rows are those of sequence {seq} at the same positions"
        yield (
            "cache_of_another_sequence",
            text,
            [_of_sequence(site, written, seq, i, x) for i, x in enumerate(rows)],
        )
    for offset in OFFSETS:
        far = f"{abs(offset)} position{'s' * (abs(offset) > 1)} {'before' if offset > 0 else 'after'}"
        yield "cache_rows_shifted", f"rows hold what was written {far}", [_shifted(x, offset) for x in rows]
        text = f"rows are rolled by {offset}: what leaves the cache at one end comes in at the other"
        yield "cache_rows_rolled", text, [np.roll(x, offset, axis=0) for x in rows]
    yield "cache_rows_reversed", "rows stand in reversed order", [x[::-1] for x in rows]
    yield "cache_heads_moved", "KV heads stand in reversed order", [x[:, ::-1] for x in rows]
    for shift in range(1, rows[0].shape[1]):
        text = f"KV heads are rolled by {shift}"
        yield "cache_heads_moved", text, [np.roll(x, shift, axis=1) for x in rows]
    for head in range(rows[0].shape[1]):
        text = f"KV heads are copies of head {head}"
        name = "cache_first_head" if head == 0 else "cache_heads_moved"
        yield name, text, [np.broadcast_to(x[:, head : head + 1], x.shape) for x in rows]


def _shifted(x: Array, by: int) -> Array:
    """Row i holds row i - by; NaN where there is none."""
    none = np.full((min(abs(by), len(x)), *x.shape[1:]), np.nan)
    return np.concatenate([none, x[:-by]]) if by > 0 else np.concatenate([x[-by:], none])


def _of_sequence(site: Site, written: str, seq: int, i: int, right: Array) -> Array | None:
    """What another sequence has written so far, or later if it is shorter: NaN beyond its rows."""
    own = site.taps.passes[site.passes[i]]
    if seq == own.seq:
        return None
    tensors = site.taps.tensors(site.near(written), site.rank)
    rows = [x.reshape(len(x), *right.shape[1:]) for one, x in zip(site.taps.passes, tensors, strict=True)
            if one.seq == seq and x is not None and x.size == len(x) * right[0].size]  # fmt: skip
    if not rows:
        return None
    found = np.concatenate(rows)[: len(right)]
    return np.concatenate([found, np.full((len(right) - len(found), *right.shape[1:]), np.nan)])


# --- rows that have several sources --------------------------------------------------------------------------


def cached_rows(site: Site) -> Iterator[Variant]:
    """Each wrong row with a source of its own: zero, or a row that was written anywhere in the layer."""
    written = written_at(site)
    scope = [each.any((0, 2)) for each in scopes(site)]  # [K]: of each part the wrong rows
    like = site.parts[0].expected[0]
    pool, reported = [np.zeros(like.size)], ["nothing (zeros)"]
    for one, x in zip(site.taps.passes, site.taps.tensors(site.near(written), site.rank), strict=True):
        if x is not None and x.size == len(one.rows) * like.size and len(pool) < _POOL:
            pool += list(x.reshape(len(one.rows), -1))
            reported += [f"sequence {one.seq}'s row {row.position}" for row in one.rows]
    sources = np.stack(pool)
    guesses, held = [part.expected.copy() for part in site.parts], {}
    for i, (part, rows) in enumerate(zip(site.parts, scope, strict=True)):
        for row in np.flatnonzero(rows):
            seen = np.where(np.isfinite(part.seen[row]), part.seen[row], np.inf).reshape(-1)
            nearest = int(np.argmin(((sources - seen) ** 2).sum(1))) if np.isfinite(seen).all() else 0
            guesses[i][row] = sources[nearest].reshape(like.shape)
            seq = site.taps.passes[site.passes[i]].seq
            held[f"sequence {seq}'s row {row}"] = reported[nearest]
    if not held:
        return
    place, source = next(iter(held.items()))
    more = f", and {len(held) - 1} other rows are wrong" if len(held) > 1 else ""
    text = f"in the place of {place} the cache holds {source}{more}"
    if set(held) == set(held.values()):
        text = f"rows stand in another order, as by a wrong block table: {text}"
    yield cache_variant(
        site, "cache_rows_wrong", text, guesses, {"rows": dict(list(held.items())[:16])}, len(held)
    )
