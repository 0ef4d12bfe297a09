"""What a wrong mask may be: which keys each query was let see, read off the scores of all heads and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import (
    all_wrong_heads,
    in_place,
    places,
    products,
    scopes,
)
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import soft_capped, visible
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.attention.mask_forms import Cells, Form, MaskForms, SeenMask


def masks(site: Site) -> Iterator[Variant]:
    """Variants of the mask of one layer on one rank."""
    if not all(part.fits for part in site.parts):
        return
    right = _unmasked(site)
    yield from _numbers(site, right)
    scope = scopes(site)
    shown = [visible(site.facts, part.seen) for part in site.parts]
    allowed = [np.isfinite(part.expected) for part in site.parts]
    at = [SeenMask(i, head, shown[i][head], scope[i][head].any(1)) for i, head in places(site)]
    if all(np.array_equal(one.cells[one.rows], allowed[one.part][one.head][one.rows]) for one in at):
        return  # each sees what it should
    known = list(MaskForms(site, at))
    fitting = [form for form in known if form.gives(at)]
    for form in fitting:
        cells = _of_forms(site, dict.fromkeys(all_wrong_heads(site), form))
        yield _variant(site, right, form.name, form.text, form.fitted, cells)
    if not fitting:
        yield from _keys_hidden(site, right, at, allowed)
        yield from _of_each_head(site, right, at, known)


def _unmasked(site: Site) -> list[Array]:
    scale, cap = site.facts.model.scale, site.facts.model.score_cap
    return [soft_capped(products(part.inputs["q"], part.inputs["k"]) * scale, cap) for part in site.parts]


def _variant(
    site: Site,
    right: Sequence[Array],
    name: str,
    text: str,
    fitted: Mapping[str, object],
    cells: Sequence[Cells],
    parameters: int = 0,
) -> Variant:
    """The right products under another mask, [heads, T, K]."""
    guesses = [np.where(seen, x, -np.inf) for seen, x in zip(cells, right, strict=True)]
    return Variant(name, "mask", text, fitted, in_place(site, guesses), parameters)


def _of_forms(site: Site, of_heads: Mapping[int, Form]) -> list[Cells]:
    """The mask of every part, with those heads' forms in the place of the right one."""
    cells = [np.isfinite(part.expected) for part in site.parts]
    for head, form in of_heads.items():
        for made, own in zip(cells, form.cells, strict=True):
            made[head] = own
    return cells


def _keys_hidden(
    site: Site, right: Sequence[Array], at: Sequence[SeenMask], allowed: Sequence[Cells]
) -> Iterator[Variant]:
    """Single keys of a sequence that no query sees, in any wrong head or pass: padding of another sequence."""
    hidden: dict[int, set[int]] = {}
    for one in at:
        should = allowed[one.part][one.head]
        lost = np.flatnonzero((should & one.rows[:, None]).any(0) & ~(one.cells & one.rows[:, None]).any(0))
        seq = site.taps.passes[site.passes[one.part]].seq
        hidden[seq] = hidden.get(seq, set()) | set(lost.tolist())
    hidden = {seq: keys for seq, keys in hidden.items() if keys}
    if not hidden:
        return
    cells = []
    for part, index, may in zip(site.parts, site.passes, allowed, strict=True):
        gone = list(hidden.get(site.taps.passes[index].seq, ()))
        cells.append(may & ~np.isin(np.arange(part.expected.shape[2]), gone))
    which = "; ".join(f"of sequence {seq} the keys at {sorted(keys)[:8]}" for seq, keys in hidden.items())
    yield _variant(
        site, right, "mask_keys_hidden", f"single keys are masked: {which}: a mask of padding, or of another sequence",
        {"keys": {str(seq): sorted(keys) for seq, keys in hidden.items()}}, cells, sum(map(len, hidden.values())),
    )  # fmt: skip


def _of_each_head(
    site: Site, right: Sequence[Array], at: Sequence[SeenMask], known: Sequence[Form]
) -> Iterator[Variant]:
    """Heads whose masks differ from each other, each of a known form."""
    chosen: dict[int, Form] = {}
    for head in all_wrong_heads(site):
        own = [one for one in at if one.head == head]
        fitting = next((form for form in [*known, *MaskForms(site, own)] if form.gives(own)), None)
        if fitting is None:
            return
        chosen[head] = fitting
    reported = "; ".join(f"head {head}: {form.text}" for head, form in list(chosen.items())[:4])
    text, fitted = (
        f"heads have masks of their own: {reported}",
        {str(h): form.name for h, form in chosen.items()},
    )
    yield _variant(site, right, "mask_of_heads", text, fitted, _of_forms(site, chosen), len(chosen))


def irregular_masks(site: Site) -> Iterator[Variant]:
    """Scores that are right, where keys are seen that should not be, or hidden that should not be, in no known form."""
    if not all(part.fits for part in site.parts):
        return
    cells = [np.isfinite(part.expected) for part in site.parts]
    patterns: set[tuple[int, int, int]] = set()  # (part, query, key)
    hidden = shown = 0
    for i, head in places(site):
        seen = visible(site.facts, site.parts[i].seen[head]) & ~np.isnan(site.parts[i].seen[head])
        hidden, shown = (
            hidden + int((cells[i][head] & ~seen).sum()),
            shown + int((seen & ~cells[i][head]).sum()),
        )
        patterns |= {(i, q, k) for q, k in np.argwhere(seen != cells[i][head]).tolist()}
        cells[i][head] = seen
    if not patterns:
        return
    part, query, key = min(patterns)
    row = site.parts[part].rows[query]
    reported = [f"hides {hidden} scores that should be seen"] * bool(hidden)
    reported += [f"shows {shown} that should be hidden"] * bool(shown)
    text = (
        f"the mask {' and '.join(reported)}, the others are right; the first is that of the query at {row.position} "
        f"(step {row.step}, sequence {row.seq}) with the key in row {key}"
    )
    fitted = {"hidden": hidden, "shown": shown}
    yield _variant(site, _unmasked(site), "mask_irregular", text, fitted, cells, 1)


# --- masks that are numbers -------------------------------------------------------------------------------

_PRODUCT = "the mask is made by multiplying with -inf: 0 * -inf is NaN in every cell"
#: (name, text, what scores [heads, T, K] become of which some should be hidden)
NUMBERS: tuple[tuple[str, str, Callable[[Cells, Array], Array]], ...] = (
    ("mask_zero_times_inf", f"{_PRODUCT} that it allows", lambda hidden, x: np.where(hidden, -np.inf, np.nan)),
    ("mask_zero_times_inf", f"{_PRODUCT} that it should hide", lambda hidden, x: np.where(hidden, np.nan, x)),
    ("mask_bool_added", "a mask of True and False is added to the scores as 1 and 0: nothing is hidden",
     lambda hidden, x: np.where(hidden, x, x + 1.0)),
    ("mask_bool_added", "a mask of True and False is added to the scores as 0 and 1: nothing is hidden",
     lambda hidden, x: np.where(hidden, x + 1.0, x)),
    ("mask_multiplied", "scores are multiplied by a mask of 1 and 0: what should be hidden scores 0",
     lambda hidden, x: np.where(hidden, 0.0, x)),
)  # fmt: skip


def _numbers(site: Site, right: Sequence[Array]) -> Iterator[Variant]:
    """A finite number added to what should be masked, or put there, that is too small to hide it; a mask of True and
    False that is added or multiplied as 1 and 0; a mask multiplied with infinity."""
    pairs = [(~np.isfinite(part.expected), x) for part, x in zip(site.parts, right, strict=True)]
    for name, text, form in NUMBERS:
        yield Variant(name, "mask", text, {}, [form(hidden, x) for hidden, x in pairs])
    gone = np.concatenate([part.seen[hidden] for part, (hidden, _) in zip(site.parts, pairs, strict=True)])
    plain = np.concatenate([x[hidden] for hidden, x in pairs])
    finite = np.isfinite(gone)
    if not finite.any():
        return
    filled, added = (float(np.median(x[finite])) for x in (gone, gone - plain))
    for how, number in (("are set to", filled), ("get the mask's", added)):
        if abs(number) > 1e-3 and abs(number) != 1:
            made = [np.where(hidden, number if how == "are set to" else x + number, x) for hidden, x in pairs]
            text = f"masked scores {how} {number:.4g}, which does not hide them: they keep a share"
            yield Variant("mask_finite", "mask", text, {"value": number}, made, 1)
