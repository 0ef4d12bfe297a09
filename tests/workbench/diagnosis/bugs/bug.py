"""`Bug`: one mistake put into transformers' own modules, or into our engine, and what a developer would call it.

    @bug("rope", accepted=("rope", "positions"), words="clamp", taps=ROTATED, model="llama")
    def positions_clamped(p):
        p.positions(lambda positions: positions.clamp(max=7))

The bugs were built from what engines do wrong, not from what the diagnosis can name. Half of the first, by a hash of
the name, are held out: `open/` and `held_out/`. Those of `unseen/`, controls too, were written when the diagnosis was
done, by somebody who did not know it; those of `unseen_2/` and so on later, in the same way. What lies in a folder is a
part of the measurement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Spoils one rank: a `Patched` model of transformers', or a `Spoilt` engine.
Patch = Callable[[Any], None]

#: Taps at which what concerns several of them may show first.
QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
ROTATED = ("attn.q_rope", "attn.k_rope")
CACHES = ("attn.k_cache", "attn.v_cache")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bug is.

    `taps` are local names, any of which may be the first to show it; `layers` None: outside the layers, or in all of
    them (then the first shows it); `heads` and `ranks`, when not empty, are the only wrong ones. `step` is the first.
    """

    taps: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class Bug:
    """`patch` spoils a loaded model. `accepted` are the classes of cause that are right; `words` is a regular
    expression that a sentence has to match which says what is wrong, not only where. `ep`: of Lockstep's own engine, in
    so many groups of experts; 0: of transformers' modules. `harmless`: a control, of which no cause may be reported."""

    name: str
    group: str
    accepted: tuple[str, ...]
    words: str
    place: Place
    patch: Patch
    model: str = "qwen2-tied"
    dtype: str = "float32"
    tp: int = 1
    harmless: bool = False
    ep: int = 0

    @property
    def seed(self) -> int:
        """Of the weights and the prompts: they vary from bug to bug."""
        return _digest(self.name)[1] % 3

    @property
    def folder(self) -> str:
        """Where it is declared: `open`, `held_out`, `unseen` or a later set."""
        return self.patch.__module__.split(".")[-2]

    @property
    def part(self) -> str:
        """Of the measurement (`benchmarks/diagnosis`): its folder, or that folder's controls. All but the open ones
        and the controls are looked at once, at the end."""
        if not self.harmless:
            return self.folder
        return "controls" if self.folder == "open" else f"{self.folder}_controls"

    @property
    def held_out(self) -> bool:
        """Which half of the first bugs it belongs to."""
        return _digest(self.name)[0] % 2 == 1


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode()).digest()


#: All that were declared, by their names.
DECLARED: dict[str, Bug] = {}


def bug(
    group: str,
    *,
    accepted: tuple[str, ...],
    words: str,
    taps: tuple[str, ...],
    layers: tuple[int, ...] | None = None,
    heads: tuple[int, ...] = (),
    ranks: tuple[int, ...] = (),
    step: int = 0,
    model: str = "qwen2-tied",
    dtype: str = "float32",
    tp: int = 1,
    ep: int = 0,
) -> Callable[[Patch], Patch]:
    """Declares the bug that the decorated function puts in; its name is the function's."""

    def declare(patch: Patch) -> Patch:
        place = Place(taps, layers, heads, ranks, step)
        _declare(Bug(patch.__name__, group, accepted, words, place, patch, model, dtype, tp, ep=ep))
        return patch

    return declare


def control(
    group: str, *, model: str = "qwen2-tied", dtype: str = "float32", tp: int = 1, ep: int = 0
) -> Callable[[Patch], Patch]:
    """Declares the harmless change that the decorated function makes."""

    def declare(patch: Patch) -> Patch:
        _declare(Bug(patch.__name__, group, (), "", Place(()), patch, model, dtype, tp, True, ep))
        return patch

    return declare


def _declare(one: Bug) -> None:
    assert one.name not in DECLARED, f"{one.name} is declared twice"
    DECLARED[one.name] = one
