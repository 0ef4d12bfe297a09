"""Commands that show numbers: print, x, rank apply all."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Group, Message, Result, TableResult, TensorValue
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, command, find
from lockstep.workbench.debugger.core.tensors import check_rank, parts_of, select, whole_of
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.language import expressions
from lockstep.workbench.debugger.language.operands import evaluate_fact
from lockstep.workbench.words.numbers import scalar

_WHICH = re.compile(r"^(?:(?:rank\s+(\d+)|seq\s+(\d+)|step\s+(\d+)|branch\s+(\S+))\s*)*$")
_REFERENCE = "TAP[index] [rank R] [seq S] [step K] [branch B]"
#: Elements that `x` shows.
_EXAMINED = 16
#: Commands that end in `rank R`.
_PER_RANK = ("print", "x", "frame")


@command(
    "print", "p", arguments=(
        Argument("what", "text", required=True, form=_REFERENCE, help="a tensor, a part of it, or an expression"),
    ),
    group="inspection", help="a tensor or a part of it, or the value of an expression",
    details="`print layers.0.attn.q_proj[0, :8]` shows the tensor as one rank alone would have had it; `… rank 1`"
    " what that rank holds; `… seq 1` another prompt's; `… step 3 branch main` what passed elsewhere;"
    " `print nan(layers.0.attn.scores) + 1` a value. A live run computes again what was not captured; a replay reports"
    " how to have it captured.",
)  # fmt: skip
def print_(debugger: Debugger, what: str) -> Result:
    """A tensor or a value."""
    try:
        name, index, rest = expressions.parse_reference(what)
    except CommandError:
        return _value(debugger, what)
    which = _WHICH.match(rest)
    if name not in debugger.timeline.places.names or which is None:
        return _value(debugger, what)
    return _tensor(debugger, name, index, which)


def tensor_value(
    debugger: Debugger, tap: str, index: list[Any] | None, rank: int | None, seq: int | None = None,
    step: int | None = None, branch: int | None = None,
) -> TensorValue:  # fmt: skip
    """A tap's tensor at the present step, or at another one: rebuilt, or one rank's."""
    parts = parts_of(debugger, tap, seq=seq, step=step, branch=branch)
    if rank is None:
        array, note = whole_of(debugger, parts)
    else:
        check_rank(debugger, rank)
        array, note = parts.by_rank[rank], f"only [{parts.part}] was captured" if parts.part else ""
    chosen = select(array, index, tap)
    return TensorValue(tap, parts.step, rank, expressions.show_index(index), chosen, parts.source, note)


@command(
    "x", arguments=(Argument("what", "text", required=True, form=_REFERENCE, help="a tensor or a part of it"),),
    group="inspection", help="the first elements of a tensor, with their bits",
)  # fmt: skip
def examine(debugger: Debugger, what: str) -> Result:
    """Numbers and bits, a row an element."""
    name, index, rest = expressions.parse_reference(what)
    which = _WHICH.match(rest)
    if which is None:
        raise CommandError(f"x {_REFERENCE}, not {clean(rest, limit=40)!r}", what, what.find(rest))
    value = _tensor(debugger, name, index, which)
    flat = np.ascontiguousarray(value.array).reshape(-1)[:_EXAMINED]
    width = flat.dtype.itemsize * 2
    bits = flat.view(f"u{flat.dtype.itemsize}")
    shape = value.array.shape
    rows = [
        [
            ", ".join(map(str, np.unravel_index(i, shape))) if shape else "",
            float(flat[i]),
            f"{int(bits[i]):0{width}x}",
        ]
        for i in range(len(flat))
    ]
    who = "" if value.rank is None else f" rank {value.rank}"
    title = f"{value.tap}{value.index}{who}, step {value.step}, {value.array.dtype}"
    if value.array.size > _EXAMINED:
        title += f", the first {_EXAMINED} of {value.array.size}"
    return TableResult(title, ["index", "value", "bits"], rows)


@command(
    "rank", arguments=(
        Argument("rest", "text", required=True, form="apply all COMMAND", help="or `apply 0,1 COMMAND`"),
    ),
    group="inspection", help="carry out print, x or frame for every rank",
)  # fmt: skip
def rank_apply(debugger: Debugger, rest: str) -> Result:
    """One answer a rank."""
    match = re.match(r"apply\s+(all|\d+(?:\s*,\s*\d+)*)\s+(.+)$", rest)
    if match is None:
        raise CommandError("rank apply all COMMAND, or rank apply 0,1 COMMAND")
    spec = find(match[2].split()[0])
    if spec.name not in _PER_RANK:
        raise CommandError(f"{spec.name} is the same on every rank: {', '.join(_PER_RANK)} distinguish them")
    ranks = range(debugger.timeline.ranks)
    chosen = list(ranks) if match[1] == "all" else [int(one) for one in match[1].split(",")]
    for rank in chosen:
        check_rank(debugger, rank)
    return Group([debugger.execute(f"{match[2]} rank {rank}") for rank in chosen])


def _tensor(debugger: Debugger, tap: str, index: list[Any] | None, which: re.Match[str]) -> TensorValue:
    rank, seq, step = (None if which[i] is None else int(which[i]) for i in (1, 2, 3))
    branch = None if which[4] is None else debugger.timeline.named(which[4]).id
    return tensor_value(debugger, tap, index, rank, seq, step, branch)


def _value(debugger: Debugger, what: str) -> Result:
    value = _plain(evaluate_fact(debugger, expressions.parse(what), what))
    shown = scalar(value) if isinstance(value, float) else clean(str(value))
    return Message(f"{what} = {shown}", {"value": value})


def _plain(value: Any) -> Any:
    """Whole numbers without a fraction: positions, steps and tokens are counted, not measured."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
