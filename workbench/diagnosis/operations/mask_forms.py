"""The forms that a mask may have: which keys [T, K] a query sees, by its position and the key's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.diagnosis.operations.blocks import positions
from workbench.diagnosis.operations.deviation import Part
from workbench.diagnosis.operations.site import Site

Cells = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one head was let see in one part: `cells` [T, K], of which `rows` [T] are to be explained."""

    part: int
    head: int
    cells: Cells
    rows: Cells


@dataclass(frozen=True, slots=True)
class Form:
    """A mask, with the numbers read off what was seen."""

    name: str
    text: str
    fitted: Mapping[str, object]
    cells: Callable[[Part], Cells]


def made_by(site: Site, form: Form, seen: Sequence[Seen]) -> bool:
    """Whether the form is what was seen, in all the rows to be explained."""
    made: dict[int, Cells] = {}
    for one in seen:
        if one.part not in made:
            made[one.part] = form.cells(site.parts[one.part])
        if not np.array_equal(made[one.part][one.rows], one.cells[one.rows]):
            return False
    return bool(seen)


def distance(part: Part) -> NDArray[np.int64]:
    """Query's position - key's position, [T, K]."""
    return np.asarray(positions(part)[:, None] - _keys(part)[None, :])


def _keys(part: Part) -> NDArray[np.int64]:
    return np.arange(part.expected.shape[2])


def within(window: int | None, ahead: int = 0) -> Callable[[Part], Cells]:
    """The causal mask of a window (None: without), which lets see so many later tokens."""

    def cells(part: Part) -> Cells:
        d = distance(part)
        return (d >= -ahead) if window is None else (d >= -ahead) & (d < window)

    return cells


def forms(site: Site, seen: Sequence[Seen]) -> Iterator[Form]:
    """Every form, but for the right one."""
    windows, layer = site.facts.model.windows, site.layer
    window = windows[layer] if windows and layer is not None else None
    inside = within(window)
    yield Form("mask_missing", "nothing is masked: tokens see later ones", {}, lambda part: distance(part) == distance(part))
    if window is not None:
        yield Form("mask_not_causal", "the window hides what is too old, but nothing hides later tokens", {},
                   lambda part: distance(part) < window)  # fmt: skip
        yield Form("window_missing", f"the sliding window of {window} is not applied", {"window": window}, within(None))
        yield Form("window_symmetric", f"the window of {window} reaches as far ahead as back", {"window": window},
                   lambda part: abs(distance(part)) < window)  # fmt: skip
    yield from _other_window(site, seen, window)
    yield Form("mask_strict", "a token does not see itself: the causal mask is off by one", {},
               lambda part: inside(part) & (distance(part) > 0))  # fmt: skip
    for ahead in (1, 2):
        words = "one later token" if ahead == 1 else "two later tokens"
        yield Form("mask_ahead", f"each token sees {words}: the causal mask is off by {ahead}", {"ahead": ahead}, within(window, ahead))
    yield Form("mask_transposed", "the mask is transposed: tokens see themselves and later ones alone", {}, lambda part: distance(part) <= 0)
    yield Form("mask_inverted", "the mask is inverted: what should be seen is hidden, and the other way", {}, lambda part: ~inside(part))
    yield Form("mask_top_left", "the causal triangle starts at the first key although tokens are cached: they are not counted",
               {}, lambda part: np.tril(np.ones(part.expected.shape[1:], dtype=bool)))  # fmt: skip
    yield Form("mask_newest_only", "each token sees itself alone", {}, lambda part: distance(part) == 0)
    yield Form("mask_of_the_step", "only tokens of the same step are seen: what is cached is masked", {},
               lambda part: inside(part) & (_keys(part) >= positions(part)[0]))  # fmt: skip
    yield from _runs_of_keys(seen, inside)
    yield from _pieces(seen, inside)


def _other_window(site: Site, seen: Sequence[Seen], window: int | None) -> Iterator[Form]:
    """The window whose width is that of what is seen in all parts together."""
    depths = [distance(site.parts[one.part])[one.cells & one.rows[:, None]] for one in seen]
    width = 1 + int(max((d.max(initial=-1) for d in depths), default=-1))
    deepest = max((int(distance(site.parts[one.part])[one.rows].max(initial=-1)) for one in seen), default=-1)
    if width < 1 or width == window or width > deepest:  # none: all that there is was seen
        return
    if window is None:
        text = f"a sliding window of {width} is applied, which this layer does not have"
    else:
        words = {1: "one token too wide", -1: "one token too narrow"}
        text = f"the sliding window is {words.get(width - window, f'{width} wide instead of {window}')}"
    same = [str(i) for i, other in enumerate(site.facts.model.windows) if other == width]
    text += f" (that of layers {', '.join(same)})" if same else ""
    yield Form("window_width", text, {"width": width, "window": window}, within(width))


def _runs_of_keys(seen: Sequence[Seen], inside: Callable[[Part], Cells]) -> Iterator[Form]:
    """The first keys seen by all, or by none; the last ones by none. The numbers are those of the longest part's rows."""
    longest = max(seen, key=lambda one: one.cells.shape[1])
    size = longest.cells.shape[1]
    for n in sorted({n for one in seen for n in _edges(one)} - {0, size}):
        keys = f"the first {n} keys are" if n > 1 else "the first key is"
        last = f"the newest {size - n} keys are" if size - n > 1 else "the newest key is"
        yield Form("mask_prefix_seen", f"{keys} seen by every token, whatever the mask", {"keys": n},
                   lambda part, n=n: inside(part) | (_keys(part) < n))  # fmt: skip
        yield Form("mask_prefix_hidden", f"{keys} masked, as padding on the left would be", {"keys": n},
                   lambda part, n=n: inside(part) & (_keys(part) >= n))  # fmt: skip
        yield Form("mask_suffix_hidden", f"{last} masked", {"keys": size - n},
                   lambda part, n=size - n: inside(part) & (_keys(part) < part.expected.shape[2] - n))  # fmt: skip
        yield Form("mask_length", f"keys from position {n} on are masked: the length of another sequence or step", {"keys": n},
                   lambda part, n=n: inside(part) & (_keys(part) < n))  # fmt: skip


def _edges(one: Seen) -> set[int]:
    """Keys at which what is seen begins or ends, in the rows to be explained."""
    rows = one.cells[one.rows]
    return set((1 + np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(0))).tolist())


def _pieces(seen: Sequence[Seen], inside: Callable[[Part], Cells]) -> Iterator[Form]:
    """Attention cut into pieces of some tokens. A piece ends where some row's cells do."""
    sizes = {n for one in seen for n in _edges(one) if n > 1}
    for size in sorted({divisor for n in sizes for divisor in range(2, n + 1) if n % divisor == 0}):
        yield Form("mask_blocks", f"tokens of the same block of {size} see each other, later ones too", {"block": size},
                   lambda part, n=size: _keys(part)[None, :] // n <= positions(part)[:, None] // n)  # fmt: skip
        yield Form("mask_chunks", f"attention is cut into chunks of {size}: a token sees nothing of earlier ones", {"chunk": size},
                   lambda part, n=size: inside(part) & (_keys(part)[None, :] // n == positions(part)[:, None] // n))  # fmt: skip
