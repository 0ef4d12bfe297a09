"""What is float32 in layers with a state, in engines of any dtype, in 16 bits: states that are kept, the share that is
kept of them, normalised queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.engine.graph.formula import Node
from lockstep.engine.graph.recurrence import by_heads, side_by_side
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, nodes
from lockstep.workbench.diagnosis.hypotheses.recurrent_words import NORMALISED_IN
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.facts import rounded
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: What a state, which should be float32 whatever the engine's dtype, may be kept in between passes.
KEPT_IN = ("bfloat16", "float16")
#: Numbers of 16 bits in a vector of a CPU: 0 of what has no end to them, 1 << 30 of what has no vectors.
_LANES = (0, 16, 32, 1 << 30)
#: How queries and keys may have been normalised: rounded afterwards, or each step in fewer bits.
_UNIT = ("rounded to {}", *(f"{NORMALISED_IN}{{}}, {lanes} lanes" for lanes in _LANES))


def shares_of(formula: Node) -> list[tuple[int, ...]]:
    """Where the share of a state that is kept is made."""
    return [path for path, node in nodes(formula) if node.name == "exp" and node.args != (Node("A_log"),)]


def coarse_edits(formula: Node) -> Iterator[tuple[Edit, ...]]:
    """What is float32 in engines of any dtype, in 16 bits: the share that is kept, normalised queries and keys."""
    shares = shares_of(formula)
    rate = "step" if any(node == Node("step") for _, node in nodes(formula)) else "decay"
    paired = [one for one in ("k", "q") if any(node == Node(one) for _, node in nodes(formula))]
    for dtype in KEPT_IN:
        yield from ((Edit(path, "applied", (dtype,)),) for path in shares)
        yield (Edit(rate, "applied", (dtype,)),)
        for how in _UNIT:
            if paired:
                yield tuple(Edit(leaf, "operand", (f"{leaf} {how.format(dtype)}",)) for leaf in paired)


def in_16_bits(site: Site, part: Part, eps: float, dim: int) -> Iterator[tuple[str, str, Array]]:
    """(leaf, name, its rows): queries and keys that were normalised in 16 bits."""
    for leaf in ("k", "q"):
        convolved = (
            site.taps.tensors(site.near(f"attn.conv_{leaf}"), site.rank) if leaf in part.inputs else ()
        )
        at = (part.rows[-1].step, part.rows[-1].seq)
        passes = zip(site.taps.passes, convolved, strict=False)
        own = [x for one, x in passes if (one.step, one.seq) == at and x is not None]
        for x in own[:1]:
            heads = by_heads(x, dim)
            for dtype in KEPT_IN:
                to = partial(rounded, dtype=dtype)
                right = heads / np.sqrt(np.square(heads).sum(-1, keepdims=True) + eps)
                ways = [to(right), *(_normalised_in(to, heads, eps, lanes) for lanes in _LANES)]
                for how, value in zip(_UNIT, ways, strict=True):
                    yield leaf, how.format(dtype), side_by_side(np.asarray(value, dtype=np.float64))


def _normalised_in(to: Callable[[Array], Array], heads: Array, eps: float, lanes: int) -> Array:
    """Heads over their lengths, each step rounded. Where an inverse root is made of single numbers, as CPUs do
    behind the last whole vector of so many `lanes`, the root itself is rounded too; 0: all is in vectors."""
    total = to(to(to(np.square(heads)).sum(-1, keepdims=True)) + eps)
    inverse, single = to(1 / np.sqrt(total)), to(1 / to(np.sqrt(total)))
    whole = inverse.size // lanes * lanes if lanes else inverse.size
    return to(heads * np.where(np.arange(inverse.size).reshape(inverse.shape) < whole, inverse, single))
