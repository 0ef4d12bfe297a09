"""Level 2: both compute with the same weights. From digests and checksums where there are any, else from operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.engine.graph import LAYER, OUTSIDE
from lockstep.engine.taps.names import local_name
from lockstep.sessions.meta import WeightShare
from lockstep.workbench.diagnosis.diagnose import Explanation
from lockstep.workbench.diagnosis.mismatch.level import Level
from lockstep.workbench.diagnosis.row_comparison import RowComparison
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.words.plain_text import plural

#: Weights that are named, of those that differ.
_NAMED = 4
#: Operations with weights of which more than this share is wrong where none without weights is: it is the weights.
_MOST = 0.5


def compare_weights(
    sides: Mapping[str, RowSide], rows: RowComparison, explained: Mapping[str, Explanation]
) -> Level:
    """`explained`: what each side does wrong by the checkpoint, where there is one."""
    differing = [
        *(
            _others(name, sides[name], found)
            for name, found in explained.items()
            if are_others(sides[name], found)
        ),
        *_between_ranks(sides),
        *_embedding(rows),
    ]
    if differing:
        return Level("weights", "differs", differing[0], tuple(differing[1:]))
    if suspected := [
        f"{len(few)} of the {name}'s {plural(len(_weighted(sides[name])), 'operation')} with weights"
        for name, found in explained.items()
        if (few := {one.tap for one in found.wrong} & _weighted(sides[name]))
    ]:
        text = f"{' and '.join(suspected)} give something else on their own inputs, by their weights or by themselves"
        return Level("weights", "unknown", f"{text} (`lockstep weights` compares weights bit by bit)")
    if len(explained) == len(sides):
        return Level(
            "weights", "equal", "no operation of either side is at odds with the checkpoint's weights"
        )
    digests = {side.session.meta.model.checkpoint for side in sides.values()}
    if len(digests) == 1 and "" not in digests:
        text = "both name the same checkpoint; what their ranks hold in memory was not compared"
        return Level("weights", "equal", text)
    if rows.taps and not rows.differing and not rows.by_statistics_alone:
        return Level("weights", "equal", "every operation gives equal bits")
    text = "the recordings do not record which weights they hold: --model CHECKPOINT judges each side by it"
    return Level("weights", "unknown", text)


def are_others(side: RowSide, found: Explanation) -> bool:
    """Whether a side computes with other weights: most operations that have any are wrong, and none without."""
    wrong, weighted = {one.tap for one in found.wrong}, _weighted(side)
    return len(wrong) > 1 and wrong <= weighted and len(wrong) > _MOST * len(weighted)


def _others(name: str, side: RowSide, found: Explanation) -> str:
    wrong = len({one.tap for one in found.wrong})
    return (
        f"the {name}'s weights are not the checkpoint's: {wrong} of {plural(len(_weighted(side)), 'operation')} with "
        "weights give something else on their own inputs, and none without"
    )


def _weighted(side: RowSide) -> set[str]:
    return {tap for tap in side.taps if has_weights(local_name(tap))}


def has_weights(tap: str) -> bool:
    """Whether an operation, by its name within the layer, multiplies by weights or looks them up."""
    operation = LAYER.get(tap) or OUTSIDE.get(tap)
    return operation is not None and operation.module != ""


def _between_ranks(sides: Mapping[str, RowSide]) -> Iterator[str]:
    """What `info weights` has recorded on both sides."""
    first, second = (_shares(side) for side in sides.values())
    both = [key for key in first if key in second and first[key].shape == second[key].shape]
    names = list(dict.fromkeys(key[0] for key in both if first[key].checksum != second[key].checksum))
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"other bits in {', '.join(names[:_NAMED])}{more}"


def _shares(side: RowSide) -> dict[tuple[str, int], WeightShare]:
    return {(one.name, one.rank): one for one in side.session.meta.weights.get(side.branch, ())}


def _embedding(rows: RowComparison) -> Iterator[str]:
    """A table is looked up, which rounds nothing: other bits are another table."""
    one = next((one for one in rows.taps if one.tap == "embed" and one.own), None)
    if one is not None and one.kind != "statistics":
        yield f"the embedding gives other bits for the same ids, in {one.own} of {plural(one.rows, 'row')}"
