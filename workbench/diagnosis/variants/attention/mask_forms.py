"""The forms that a mask may have: which keys [T, K] a query sees, by its position and the key's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import key_positions, positions
from lockstep.workbench.diagnosis.operations.attention import cells_seen
from lockstep.workbench.diagnosis.operations.site import Site

Cells = NDArray[np.bool_]

#: Lengths of a run of first keys that are tried beside a window.
_FIRST = 8


@dataclass(frozen=True, slots=True)
class SeenMask:
    """What one head was let see in one part: `cells` [T, K], of which `rows` [T] are to be explained."""

    part: int
    head: int
    cells: Cells
    rows: Cells


@dataclass(frozen=True, slots=True)
class Form:
    """A mask, with the numbers read off what was seen: cells [T, K] for each part."""

    name: str
    text: str
    fitted: Mapping[str, object]
    cells: Sequence[Cells]

    def gives(self, seen: Sequence[SeenMask]) -> bool:
        """Whether it is what was seen, in all the rows to be explained."""
        return bool(seen) and all(
            np.array_equal(self.cells[one.part][one.rows], one.cells[one.rows]) for one in seen
        )


class MaskForms:
    """Every form but the right one, for a site at which that was `seen`."""

    def __init__(self, site: Site, seen: Sequence[SeenMask]) -> None:
        windows, layer = site.facts.model.windows, site.layer
        self.window = windows[layer] if windows and layer is not None else None
        self.windows, self.seen = windows, seen
        self.steps = [site.taps.passes[i].step for i in site.passes]
        self.keys = [key_positions(part)[None, :] for part in site.parts]  # [1, K]
        self.queries = [positions(part)[:, None] for part in site.parts]  # [T, 1]
        self.distances = [q - k for q, k in zip(self.queries, self.keys, strict=True)]  # [T, K]
        pairs, self.chunked = self._pairs(), site.facts.model.chunked and self.window is not None
        self.right = [cells_seen(q, k, self.window, self.chunked) for k, q in pairs]

    def within(self, window: int | None, ahead: int = 0) -> list[Cells]:
        """The causal mask of a window (None: without), which lets see so many later tokens."""
        most = np.inf if window is None else window
        return [(d >= -ahead) & (d < most) for d in self.distances]

    def _right_in_prefill(self, causal: Sequence[Cells]) -> bool:
        """Whether the window hides something in the first step, and is right there."""
        first = [number for number, step in enumerate(self.steps) if step == min(self.steps)]
        wrong = {one.part for one in self.seen}
        return not wrong & set(first) and any((causal[i] != self.right[i]).any() for i in first)

    def __iter__(self) -> Iterator[Form]:
        d, window = self.distances, self.window
        everything = [np.full(x.shape, True) for x in d]
        causal = self.within(None)
        if any((~causal[one.part][one.rows]).any() for one in self.seen):
            yield Form("mask_missing", "nothing is masked: tokens see later ones", {}, everything)
        if self.chunked and window is not None:
            fitted = {"chunk": window}
            text = f"attention is not cut into chunks of {window}: a token sees what lies before its own"
            yield Form("chunks_missing", text, fitted, causal)
            text = (
                f"the chunk of {window} is taken for a sliding window: a token sees the end of the one before"
            )
            yield Form("chunks_sliding", text, fitted, self.within(window))
            text = f"tokens of the same chunk of {window} see each other, later ones too"
            same = [k // window == q // window for k, q in self._pairs()]
            yield Form("chunks_not_causal", text, fitted, same)
        elif window is not None:
            fitted = {"window": window}
            text = "the window hides what is too old, but nothing hides later tokens"
            yield Form("mask_not_causal", text, fitted, [x < window for x in d])
            if self._right_in_prefill(causal):
                text = f"the sliding window of {window} is applied in the prefill alone"
                yield Form("window_prefill_only", text, fitted, causal)
            else:
                text = f"the sliding window of {window} is not applied"
                yield Form("window_missing", text, fitted, causal)
            text = f"the window of {window} reaches as far ahead as back"
            yield Form("window_symmetric", text, fitted, [abs(x) < window for x in d])
        yield from self._other_window()
        text = "a token does not see itself: the causal mask is off by one"
        yield Form("mask_strict", text, {}, [right & (x > 0) for right, x in zip(self.right, d, strict=True)])
        for ahead, words in ((1, "one later token"), (2, "two later tokens")):
            text = f"each token sees {words}: the causal mask is off by {ahead}"
            yield Form("mask_ahead", text, {"ahead": ahead}, self.within(window, ahead))
        text = "the mask is transposed: tokens see themselves and later ones alone"
        yield Form("mask_transposed", text, {}, [x <= 0 for x in d])
        text = "the mask is inverted: what should be seen is hidden, and the other way"
        yield Form("mask_inverted", text, {}, [~x for x in self.right])
        text = "the causal triangle starts at the first key: the tokens in the cache are not counted"
        yield Form("mask_top_left", text, {}, [np.tril(x) for x in everything])
        yield Form("mask_newest_only", "each token sees itself alone", {}, [x == 0 for x in d])
        text = "only tokens of the same step are seen: what is cached is masked"
        old = [k < q[:1] for k, q in zip(self.keys, self.queries, strict=True)]
        yield Form("mask_of_the_step", text, {}, self._less(old))
        for by, words in ((1, "before"), (-1, "after")):
            text = f"each query has the mask of the one {words} it: rows of the mask are shifted by one"
            rolled = [np.roll(x, by, axis=0) for x in self.right]
            yield Form("mask_rows_shifted", text, {"by": by}, rolled)
            if by == 1:
                kept = [np.concatenate([x[:1], y[1:]]) for x, y in zip(self.right, rolled, strict=True)]
                yield Form("mask_rows_shifted", f"{text}, but for the first one", {"by": by}, kept)
        yield from self._runs_of_keys()
        yield from self._first_and_newest()
        yield from self._in_steps()
        yield from self._pieces()

    def _less(self, hidden: Sequence[Cells]) -> list[Cells]:
        """The right mask, with more hidden."""
        return [right & ~gone for right, gone in zip(self.right, hidden, strict=True)]

    def _other_window(self) -> Iterator[Form]:
        """The window whose width is that of what is seen in all parts together."""
        depths = [self.distances[one.part][one.cells & one.rows[:, None]] for one in self.seen]
        width = 1 + int(max((x.max(initial=-1) for x in depths), default=-1))
        deepest = max(
            (int(self.distances[one.part][one.rows].max(initial=-1)) for one in self.seen), default=-1
        )
        if width < 1 or width == self.window or width > deepest:  # all that there is was seen
            return
        if self.window is None:
            text = f"a sliding window of {width} is applied, which this layer does not have"
        elif self.chunked:
            text = f"a sliding window of {width} takes the place of chunks of {self.window}"
        else:
            words = {1: "one token too wide", -1: "one token too narrow"}
            other = f"{width} wide instead of {self.window}"
            text = f"the sliding window is {words.get(width - self.window, other)}"
        same = [str(i) for i, other_window in enumerate(self.windows) if other_window == width]
        text += f" (that of layers {', '.join(same)})" if same else ""
        yield Form("window_width", text, {"width": width, "window": self.window}, self.within(width))

    def _runs_of_keys(self) -> Iterator[Form]:
        """The first keys seen by all, or by none; the last ones by none. Their number is that at which some row's cells
        begin or end."""
        for n in sorted({n for one in self.seen for n in _edges(one)}):
            keys, fitted = f"the first {n} keys are" if n > 1 else "the first key is", {"keys": n}
            first = [k < n for k in self.keys]
            text = f"{keys} seen by every token, whatever the mask"
            both = [x | y for x, y in zip(self.right, first, strict=True)]
            yield Form("mask_prefix_seen", text, fitted, both)
            yield Form(
                "mask_prefix_hidden",
                f"{keys} masked, as padding on the left would be",
                fitted,
                self._less(first),
            )
            text = f"keys from position {n} on are masked: the length of another sequence or step"
            yield Form("mask_length", text, fitted, self._less([~x for x in first]))
        for n in sorted({one.cells.shape[1] - n for one in self.seen for n in _edges(one)}):
            text = f"the newest {n} keys are masked" if n > 1 else "the newest key is masked"
            newest = [k > k.max(initial=0) - n for k in self.keys]
            yield Form("mask_suffix_hidden", text, {"keys": n}, self._less(newest))

    def _first_and_newest(self) -> Iterator[Form]:
        """A window beside the first keys, as where a cache keeps both and drops the middle (StreamingLLM)."""
        edges = sorted({n for one in self.seen for n in _edges(one)})
        shown = [(self.distances[one.part], one.cells & one.rows[:, None]) for one in self.seen]
        for first in edges[:_FIRST]:
            wide = [int(d[:, first:].max(initial=-1, where=seen[:, first:])) for d, seen in shown]
            width = 1 + max(wide, default=-1)
            if width > 0:
                firsts = f"the first {first} keys" if first > 1 else "the first key"
                text = f"only {firsts} and the newest {width} are seen, nothing between them"
                cells = [
                    right & ((k < first) | (d < width))
                    for right, k, d in zip(self.right, self.keys, self.distances, strict=True)
                ]
                yield Form("mask_first_and_newest", text, {"first": first, "window": width}, cells)

    def _in_steps(self) -> Iterator[Form]:
        """Every n-th key alone, by the distance from the query; every second block of keys; windows in blocks."""
        longest = max((one.cells.shape[1] for one in self.seen), default=0)
        for n in (n for n in (2, 3, 4) if longest > 2 * n):
            text = f"each token sees only keys at distances that are multiples of {n}: dilated attention"
            yield Form("mask_dilated", text, {"every": n}, self._less([d % n != 0 for d in self.distances]))
        for size in (size for size in (1, 2, 4, 8, 16, 32) if longest > 3 * size):
            for odd in (0, 1):
                text = f"of the blocks of {size} keys every second is left out"
                gone = [(k // size + np.zeros_like(q)) % 2 != odd for k, q in self._pairs()]
                yield Form("mask_every_other_block", text, {"block": size, "kept": odd}, self._less(gone))
        for size in (size for size in (2, 4, 8, 16, 32, 64) if longest > 2 * size):
            for count in (2, 3, 4):
                text = f"the window is counted in blocks of {size}: each token sees {count} of them, its own among them"
                gone = [q // size - k // size >= count for k, q in self._pairs()]
                fitted = {"block": size, "blocks": count}
                yield Form("mask_window_of_blocks", text, fitted, self._less(gone))

    def _pairs(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return zip(self.keys, self.queries, strict=True)

    def _pieces(self) -> Iterator[Form]:
        """Attention cut into pieces of some tokens. A piece ends where some row's cells do."""
        ends = {n for one in self.seen for n in _edges(one) if n > 1}
        for n in sorted({size for end in ends for size in range(2, end + 1) if end % size == 0}):
            pairs = list(self._pairs())
            text = f"tokens of the same block of {n} see each other, later ones too"
            yield Form("mask_blocks", text, {"block": n}, [k // n <= q // n for k, q in pairs])
            text = f"attention is cut into chunks of {n}: a token sees nothing of earlier ones"
            of_chunk = [(k // n == q // n) & (k <= q) for k, q in pairs]
            yield Form(
                "mask_chunks",
                text,
                {"chunk": n},
                of_chunk if self.chunked else self._less([~x for x in of_chunk]),
            )


def _edges(one: SeenMask) -> set[int]:
    """Keys at which what is seen begins or ends, in the rows to be explained."""
    rows = one.cells[one.rows]
    return set((1 + np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(0))).tolist())
