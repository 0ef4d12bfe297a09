"""What a part of a weight in memory is, where it is not what the checkpoint has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.rows import RowRun, as_spans

#: Numbers that are looked at where all would take long, and before all are.
_SAMPLE, _FEW = 1 << 20, 1 << 14
#: By how much more a fit of few of them may be off.
_SLACK = 10.0
#: Share of its size by which a fit may be off, beyond the rounding of the dtype.
_FIT = 1e-5
#: Above this correlation with the checkpoint's numbers they have something to do with it.
_RELATED = 0.2
#: Above this cosine a row of at least so many numbers is the checkpoint's own.
_ALTERED, _WIDE = 0.9, 16
#: An adapter has at most this rank; rows and columns of which it is found.
_LARGEST_RANK, _CORNER = 256, 1024
_ROUNDED = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """How a weight is not the checkpoint's: `kind`, in words `text`. Two of a `kind` with the same `key` are the same
    mistake, whatever the figures in their words."""

    kind: str
    text: str = field(compare=False)
    key: str = ""

    @classmethod
    def in_words(cls, kind: str, text: str) -> Mistake:
        """One that all its words distinguish from others."""
        return cls(kind, text, text)

    def of_rows(self, scope: str) -> Mistake:
        """The same of some rows alone."""
        return replace(self, text=scope + self.text, key=scope + self.key) if scope else self


def are_altered(x: Tensor, y: Tensor) -> bool:
    """Whether rows in memory still point where the checkpoint's do: they are these, with other numbers, and no other
    ones need be looked for."""
    a, b = (_rows_of(one, _FEW).double() for one in (x, y))
    along = (a * b).sum(1) > _ALTERED * a.norm(dim=1) * b.norm(dim=1)
    return x.shape[1] >= _WIDE and bool(along.all())


def explain_numbers(x: Tensor, y: Tensor) -> Mistake:
    """x [n, m] in memory, y [n, m] the checkpoint's for it: both of the dtype in memory."""
    finite = x.isfinite()
    if not bool(finite.all()):
        wrong = int((~finite).sum())
        return Mistake("not finite", f"{wrong} of {x.numel()} numbers are NaN or infinite")
    if not bool(x.any()):
        return Mistake("zeros", "all zeros: never loaded, or overwritten")
    if bool((x == x.flatten()[0]).all()):
        return Mistake(
            "constant",
            f"{float(x.flatten()[0]):g} everywhere: left as initialised",
            f"{float(x.flatten()[0]):g}",
        )
    for look in (rounded, _transposed, _other_columns, _fitted):
        if (found := look(x, y)) is not None:
            return found
    return _by_likeness(x, y)


def rounded(x: Tensor, y: Tensor) -> Mistake | None:
    """What went through a narrower dtype."""
    for name, dtype in _ROUNDED.items():
        if dtype.itemsize >= x.element_size():
            continue
        if all(torch.equal(b.to(dtype).to(x.dtype), a) for a, b in ((x[:1], y[:1]), (x, y))):
            return Mistake("rounded", f"the checkpoint's, rounded to {name}", name)
    return None


def _transposed(x: Tensor, y: Tensor) -> Mistake | None:
    if min(x.shape) > 1 and torch.equal(y.T.reshape(x.shape), x):
        return Mistake("transposed", "the checkpoint's, transposed")
    return None


def _other_columns(x: Tensor, y: Tensor) -> Mistake | None:
    """The same numbers in each row, in another order."""
    if min(x.shape) < 2 or not torch.equal(x[:1].sort(1).values, y[:1].sort(1).values):
        return None
    order = _order(x.T, y.T)
    return (
        None
        if order is None
        else Mistake.in_words(
            "columns", f"the checkpoint's with its columns in another order: {in_order(order)}"
        )
    )


def _order(x: Tensor, y: Tensor) -> list[int] | None:
    """Which row of y each row of x is; None where one is none."""
    places = {bytes(row.numpy().tobytes()): i for i, row in enumerate(y.double().contiguous())}
    found = [places.get(bytes(row.numpy().tobytes())) for row in x.double().contiguous()]
    return None if None in found else [at for at in found if at is not None]


def _fitted(x: Tensor, y: Tensor) -> Mistake | None:
    """A factor of all or of each row, or something added."""
    noise = torch.finfo(x.dtype).eps + _FIT if x.dtype.is_floating_point else _FIT
    few = _rows_of(x, _FEW), _rows_of(y, _FEW)
    if bool(few[1].any()) and _fit(*few, _SLACK * noise) is None:
        return None
    return _fit(x, y, noise)


def _fit(x: Tensor, y: Tensor, noise: float) -> Mistake | None:
    """The same, off by no more than `noise` of it."""
    a, b = x.double(), y.double()
    if (square := float((b * b).sum())) == 0:
        return None
    scale = float((a * b).sum()) / square
    if float((a - scale * b).norm()) <= noise * float(a.norm()):
        return Mistake("scaled", f"{scale:.4g} times the checkpoint's", f"{scale:.4g}")
    offset = float((a - b).mean())
    if float((a - b - offset).norm()) <= noise * float(a.norm()):
        return Mistake(
            "offset", f"the checkpoint's {'+' if offset > 0 else '-'} {abs(offset):.4g}", f"{offset:.4g}"
        )
    by_row = (a * b).sum(1, keepdim=True) / (b * b).sum(1, keepdim=True).clamp_min(
        torch.finfo(torch.float64).tiny
    )
    if min(x.shape) > 1 and float((a - by_row * b).norm()) <= noise * float(a.norm()):
        low, high = float(by_row.min()), float(by_row.max())
        return Mistake(
            "scaled rows", f"the checkpoint's, each row times a factor of its own ({low:.3g} to {high:.3g})"
        )
    return None


def _by_likeness(x: Tensor, y: Tensor) -> Mistake:
    """Related numbers differ by a matrix of low rank, or by a little; others have nothing to do with the checkpoint."""
    a, b = (_rows_of(one, _SAMPLE).double() for one in (x, y))
    both = torch.stack([a.flatten(), b.flatten()])
    correlation = float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else 0.0
    if not correlation > _RELATED:
        text = f"not the checkpoint's (mean {float(a.mean()):.2g}, deviation {float(a.std()):.2g}): "
        text += "left as initialised, or another checkpoint's"
        return Mistake("unrelated", text)
    share = float((a - b).norm() / b.norm())
    if (rank := _rank(x[:_CORNER, :_CORNER].double() - y[:_CORNER, :_CORNER].double())) is not None:
        return Mistake(
            "low rank",
            f"the checkpoint's plus a matrix of rank {rank} ({share:.2g} of it): an adapter is merged",
            str(rank),
        )
    text = f"near the checkpoint's (off by {share:.2g} of it, correlation {correlation:.4f}): "
    text += "quantised, or of another training step"
    return Mistake("near", text)


def _rows_of(x: Tensor, numbers: int) -> Tensor:
    """Rows of a matrix, all over it, that have about so many numbers."""
    return x[:: max(1, x.numel() // numbers)]


def _rank(corner: Tensor) -> int | None:
    """The rank of a corner of a matrix, if that is low; it is not where that of a smaller one is too large."""
    most = min(_LARGEST_RANK, min(corner.shape) // 4)
    for side in (most + most // 4 + 1, _CORNER):
        values = torch.linalg.svdvals(corner[:side, :side])
        rank = int((values > 1e-4 * values[0]).sum())
        if rank > most:
            return None
    return rank or None


def in_order(order: list[int]) -> str:
    """A permutation by its first numbers, and by its pattern if it has one that is known."""
    shown = ", ".join(map(str, order[:4])) + (", …" if len(order) > 4 else "")
    return f"{shown}{_pattern(order)}"


def _pattern(order: list[int]) -> str:
    n = len(order)
    for size in (n, *(d for d in (256, 192, 128, 96, 80, 64, 48, 32, 24, 16, 8, 4) if d < n and n % d == 0)):
        half = size // 2
        if size % 2 or not half:
            continue
        halves = [i // 2 + half * (i % 2) for i in range(size)]
        for words, block in (
            ("halves made neighbours", halves),
            ("neighbours made halves", [halves.index(i) for i in range(size)]),
        ):
            if size > 2 and order == [start + i for start in range(0, n, size) for i in block]:
                return f" ({words}, in every {size})"
    for size in (d for d in (256, 192, 128, 96, 80, 64, 48, 32, 16, 8) if d < n and n % d == 0):
        if all(order[i] % size == i % size for i in range(n)):
            return f" (whole blocks of {size})"
    return " (backwards)" if order == list(range(n))[::-1] else ""


def in_another_order(runs: list[RowRun], wanted: RowRun) -> Mistake | None:
    """Whether the rows are those that should be there, in another order. `wanted` is where they should be."""
    rows = [run.first + i for run in runs for i in range(run.rows.size) if run.origin == wanted.origin]
    if sorted(rows) != list(range(wanted.first, wanted.first + wanted.rows.size)):
        return None
    order = in_order([row - wanted.first for row in rows])
    return Mistake.in_words("order", f"its rows in another order: {order}")


def explain_rows(runs: list[RowRun], count: int, place_of: Callable[[RowRun], str]) -> Mistake | None:
    """What `count` rows are that are all somewhere in the checkpoint; None where some are nowhere. `place_of` names a
    place in the eyes of the weight's user."""
    if sum(run.rows.size for run in runs) < count:
        return None
    if len(runs) == 1:
        (run,) = runs
        return Mistake.in_words("elsewhere", f"{place_of(run)} instead")
    return Mistake.in_words("elsewhere", "; ".join(_listed(runs, place_of)))


def _listed(runs: list[RowRun], place_of: Callable[[RowRun], str]) -> Iterator[str]:
    for run in runs[:3]:
        yield f"rows {run.rows} are {place_of(run)}"
    if len(runs) > 3:
        yield f"and so on, in {len(runs)} pieces"


def in_rows(rows: list[int], count: int) -> str:
    """ "" for all rows, else which."""
    if len(rows) == count:
        return ""
    spans: list[Span] = as_spans(rows)
    shown = ", ".join(map(str, spans[:3])) + (f" and {len(spans) - 3} more pieces" if len(spans) > 3 else "")
    return f"rows {shown} of {count}: "
