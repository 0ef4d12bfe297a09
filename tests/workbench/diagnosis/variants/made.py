"""Sites made of arrays: an operation's inputs and what an engine that is wrong would have recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import operation_of
from lockstep.engine.taps.names import local_name
from lockstep.workbench.diagnosis.hypotheses.variant import Bank, Fit, cost, fit, preference
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.expected import Operands
from lockstep.workbench.diagnosis.operations.facts import LARGEST, Facts, rounded
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import ROW_WISE
from lockstep.workbench.diagnosis.search import Search

Array = NDArray[np.float64]

MODEL = ModelConfig(
    family="llama", hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=131, max_position=256, rms_eps=1e-6, rope_theta=500_000.0,
)  # fmt: skip

#: A prompt of twelve tokens and one of five, and three decode steps of each.
ROWS = tuple(
    Row(step, seq, position, 40 + position, position, prompt + step)
    for step in range(4)
    for seq, prompt in ((0, 12), (1, 5))
    for position in (range(prompt) if step == 0 else [prompt + step - 1])
)
POSITIONS = np.array([row.position for row in ROWS], dtype=np.float64)
DECODE = np.array([row.step > 0 for row in ROWS])


@dataclass(frozen=True)
class MadeTaps:
    """What else was recorded: tensors by tap, of each rank or the same on all."""

    tensors: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1

    @property
    def ranks(self) -> range:
        return range(self.tp)

    def rows(self, tap: str, rank: int, passes: Sequence[int]) -> Array | None:
        found = self.tensors.get(tap)
        return found[rank] if isinstance(found, tuple) else found

    def whole(self, tap: str, passes: Sequence[int]) -> Array | None:
        found = self.tensors.get(tap)
        return np.concatenate(found, axis=-1) if isinstance(found, tuple) else found


def made_site(
    operation: str,
    tap: str,
    inputs: Mapping[str, Array],
    seen: Array,
    *,
    model: ModelConfig = MODEL,
    weights: Mapping[str, Array] | None = None,
    others: Mapping[str, Any] | None = None,
    tp: int = 1,
    rank: int = 0,
    dtype: str = "float32",
    rows: tuple[Row, ...] = ROWS,
    span: slice | None = None,
    columns: slice | None = None,
) -> Site:
    """The site at which `seen`, rounded to the engine's dtype, was recorded."""
    held = {name: rounded(weight, dtype) for name, weight in (weights or {}).items()}
    facts = Facts(model, dtype, held.get)
    given = {role: rounded(x, dtype).astype(np.float64) for role, x in inputs.items()}
    names = {
        role: name for role, name in weight_names(tap, operation, facts).items() if name.format(0) in held
    }
    expected, noise = ROW_WISE[operation](
        Operands(facts, rows, given, names, span, columns, operation_of(model, local_name(tap)))
    )
    part = Part(
        rows,
        given,
        rounded(seen, dtype).astype(np.float64).reshape(expected.shape),
        expected,
        noise,
        LARGEST[dtype],
    )
    taps = cast(RecordedTaps, MadeTaps(others or {}, tp))
    return Site(tap, operation, rank, (rank,), (part,), facts, taps, (0,), names, span, columns)


def fits(site: Site, banks: Iterable[Bank]) -> list[Fit]:
    """The variants that explain the site's deviation, fewest fitted numbers first, then those that fit where the
    operation is right too; after them those that explain a part. Empty where it has none."""
    if site.deviation is None:
        return []
    found = []
    for bank in banks:
        with np.errstate(all="ignore"):
            found += [one for variant in bank(site) if (one := fit(site, variant)) is not None]
    return sorted(found, key=preference)


def explained(site: Site) -> list[Fit]:
    """What explains a site, in part as well: the banks of last resort are asked where no other fits."""
    return Search().fits(site)[0]


def accepted(site: Site) -> list[Fit]:
    """The variants that reproduce what was seen."""
    return [one for one in explained(site) if one.accepted]


def best(site: Site) -> list[Fit]:
    """Of those, the ones that are reported first: with the fewest fitted numbers, and right where the operation is."""
    found = accepted(site)
    return [one for one in found if _rank(one) == _rank(found[0])]


def _rank(one: Fit) -> tuple[int, bool]:
    return cost(one.variant.parameters, one.ratio), one.everywhere


def names(site: Site) -> set[str]:
    """The causes told first."""
    return {one.variant.name for one in best(site)}


def drawn(rng: np.random.Generator, *shape: int, size: float = 1.0) -> Array:
    """Normal numbers that every dtype can hold."""
    return rounded(rounded(rng.normal(0, size, shape), "bfloat16"), "float16").astype(np.float64)


def of_model(**changes: Any) -> ModelConfig:
    return replace(MODEL, **changes)
