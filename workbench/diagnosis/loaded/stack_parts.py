"""Which part of a stack in an order of its own a rank has: whole matrices of it, or the same columns of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.places import Shape, part_of


@dataclass(frozen=True, slots=True)
class StackPart:
    """A stack of shape `whole` of which a rank of `size` has `taken` along `dim`, or all."""

    whole: Shape
    size: int
    dim: int
    taken: Span

    @classmethod
    def of(cls, whole: Shape, held: Shape, rank: int, size: int) -> Self | None:
        """None where `held` is no part of it that is cut along one dimension."""
        cut = [dim for dim, sizes in enumerate(zip(whole, held, strict=False)) if sizes[0] != sizes[1]]
        if len(whole) != len(held) or len(cut) > 1:
            return None
        dim = cut[0] if cut else 0
        taken = part_of(whole[dim], held[dim], rank, size)
        return None if taken is None else cls(whole, size, dim, taken)

    @property
    def cuts_matrices(self) -> bool:
        return self.dim > 0

    def has_matrix(self, matrix: int) -> bool:
        return self.cuts_matrices or self.taken.start <= matrix < self.taken.stop

    def ways(self, whole: Tensor) -> Iterator[Tensor]:
        """What the rank may have: neighbours, or, of two matrices side by side, the same part of each."""
        yield whole.narrow(self.dim, self.taken.start, self.taken.size)
        if self.cuts_matrices and not any(
            n % 2 for n in (self.whole[self.dim], self.taken.start, self.taken.size)
        ):
            start, size = self.taken.start // 2, self.taken.size // 2
            yield torch.cat(
                [half.narrow(self.dim, start, size) for half in whole.chunk(2, self.dim)], self.dim
            )

    def of_rank(self, whole: Tensor, rank: int) -> Tensor:
        """The part of another rank."""
        taken = part_of(self.whole[self.dim], self.taken.size, rank, self.size)
        assert taken is not None, "what is a part on one rank is one on each"
        return whole.narrow(self.dim, taken.start, taken.size)
