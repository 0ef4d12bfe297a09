"""What `expect` and `print` may speak of beyond a tap: the branch, its text, verdicts, tensors.

    golden == match          tokens == [12, 7]        text contains "rain"       cause == bias_dropped
    nan(layers.0.attn.scores) > 0                     layers.0.attn.q_proj[0, 3] < 1.5
    origin == layers.0.attn.scores                    reason == exception        rule.mask == additive

`kv_len` are the rows that the layer which is stood in has cached, between the layers those of the layer with the
fewest; of several ranks it is the one with the fewest. A statistic without a rank is taken over all of them: the
least min, the greatest max and absmax, the sum of the counts, the mean of mean and rms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.engine.faults.catalogue import DEFAULTS
from lockstep.sessions.records import STATISTICS
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.judgements import last_judgement
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.core.origins import find_origin
from lockstep.workbench.debugger.core.step_tokens import StepTokens
from lockstep.workbench.debugger.core.tensors import check_rank, parts_of, select, statistics_at, whole_of
from lockstep.workbench.debugger.errors import CommandError, NotCaptured
from lockstep.workbench.views.cached_lengths import rows_of

Fact = float | str | list[Any]

_MERGE: dict[str, Callable[[list[float]], float]] = {
    "min": min, "max": max, "absmax": max, "nan": sum, "inf": sum, "zeros": sum,
    "mean": lambda v: sum(v) / len(v), "rms": lambda v: sum(v) / len(v),
}  # fmt: skip
_NUMERIC: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "+": operator.add, "-": operator.sub, "*": operator.mul,
}  # fmt: skip
NAMES = (
    "step", "branch", "rank", "token", "position", "kv_len", "golden", "cause", "tokens", "text", "reason", "tap",
    "desync", "origin", *STATISTICS,
)  # fmt: skip


def evaluate_fact(debugger: Debugger, tree: Any, line: str) -> Fact:
    """The value of an expression; true is 1."""
    if isinstance(tree, int | float):
        return float(tree)
    head, *rest = tree
    if head == "string":
        return str(rest[0])
    if head == "list":
        return [evaluate_fact(debugger, one, line) for one in rest]
    if head == "name":
        return named(debugger, rest[0], line)
    if head == "tap":
        return _element(debugger, rest[0], rest[1], line)
    if head == "statistic":
        return statistic(debugger, rest[0], rest[1], rest[2])
    if head == "and":
        left = _truth(evaluate_fact(debugger, rest[0], line))
        return float(left and _truth(evaluate_fact(debugger, rest[1], line)))
    if head == "or":
        left = _truth(evaluate_fact(debugger, rest[0], line))
        return float(left or _truth(evaluate_fact(debugger, rest[1], line)))
    if head == "not":
        return float(not _truth(evaluate_fact(debugger, rest[0], line)))
    if head == "-" and len(rest) == 1:
        return -_number(evaluate_fact(debugger, rest[0], line), line)
    return _binary(debugger, head, rest, line)


def _binary(debugger: Debugger, head: str, rest: list[Any], line: str) -> Fact:
    left = evaluate_fact(debugger, rest[0], line)
    word = _word(rest[1]) if isinstance(left, str) else None
    right = evaluate_fact(debugger, rest[1], line) if word is None else word
    if head in ("==", "!="):
        return float((left == right) is (head == "=="))
    if head == "contains":
        if isinstance(left, str) and isinstance(right, str):
            return float(right in left)
        if isinstance(left, list):
            return float(right in left)
        raise CommandError("contains wants a text or a list on its left", line)
    a, b = _number(left, line), _number(right, line)
    if head == "/":
        return a / b if b else float("nan")
    return float(_NUMERIC[head](a, b))


def _word(tree: Any) -> str | None:
    """A bare word beside a text is itself a text: `golden == match`, `tap == layers.0.attn.scores`."""
    return str(tree[1]) if isinstance(tree, list) and tree[0] == "name" else None


def named(debugger: Debugger, name: str, line: str) -> Fact:
    """The value of a name."""
    at, timeline = debugger.position, debugger.timeline
    if name in STATISTICS:
        if at.place is None:
            raise CommandError(f"{name} of what? write {name}(TAP)", line, max(line.find(name), 0))
        return statistic(debugger, name, timeline.places.names[at.place], None)
    if name.startswith("fault."):
        rule = name.removeprefix("fault.")
        if rule not in DEFAULTS:
            raise CommandError(f"there is no fault {rule!r}: `info toggles` lists them", line)
        return timeline.line(at.branch).rules.get(rule, DEFAULTS[rule])
    if name in timeline.places.names:
        return _element(debugger, name, None, line)
    if name == "tap":
        return timeline.places.name(at.place)
    if name in _FACTS:
        return _FACTS[name](debugger)
    if "." in name:
        timeline.places.exact(name)  # reports which tap was meant
    known = ", ".join(sorted(NAMES))
    raise CommandError(
        f"{clean(name, limit=40)!r} is unknown: use {known}, fault.NAME or a tap",
        line,
        max(line.find(name), 0),
    )


def statistic(debugger: Debugger, name: str, tap: str, rank: int | None) -> float:
    """A statistic of a tap at the present step, of one rank or of all."""
    rows = statistics_at(debugger, debugger.timeline.places.exact(tap))
    if rank is not None:
        check_rank(debugger, rank)
    values = [row[STATISTICS.index(name)] for row in rows]
    return float(values[rank] if rank is not None else _MERGE[name](values))


def golden_verdict(debugger: Debugger) -> str:
    """What `golden` found on this branch last: "match", "diverged", or "none"."""
    event = last_judgement(debugger)
    return "none" if event is None else event.verdict


def _cause(debugger: Debugger) -> str:
    """The name of the cause that `golden` found last on this branch, "none" where there is none."""
    event = last_judgement(debugger)
    return event.causes[0].name if event is not None and event.causes else "none"


def _step_tokens(debugger: Debugger) -> StepTokens:
    at, found = require_step(debugger), debugger.step_tokens()
    if found is None:
        raise NotCaptured(debugger.timeline.batch(at.branch).why_absent(debugger.sequence, at.step))
    return found


def _emitted(debugger: Debugger) -> float:
    """The token that the step has emitted, -1 where it has not yet."""
    emitted = _step_tokens(debugger).emitted
    return -1.0 if emitted is None else float(emitted)


def _kv_len(debugger: Debugger) -> float:
    """Rows that are cached in the layer that is stood in (between the layers: in the one with the fewest), on the rank
    that has the fewest."""
    at, timeline, flight = require_step(debugger), debugger.timeline, debugger.flight
    if flight is not None and flight.step == at.step:
        return min(
            (float(rows.get(debugger.sequence, math.nan)) for rows in flight.stopped.kv_lens),
            default=math.nan,
        )
    reported = timeline.sequence(at.branch, at.step, debugger.sequence)
    layer = None if at.place is None else timeline.places.layers[at.place]
    lengths = reported.kv_lens if reported is not None else ()
    found = [rows_of(lengths, rank, layer) for rank in range(timeline.ranks)]
    return min((float(rows) for rows in found if rows is not None), default=math.nan)


def _tokens(debugger: Debugger) -> list[int]:
    at = debugger.position
    stop = min(at.step, debugger.timeline.last(at.branch)) + 1
    return debugger.timeline.tokens(at.branch, debugger.sequence, stop)


def _text(debugger: Debugger) -> str:
    text = debugger.texts.joined(_tokens(debugger))
    if text is None:
        raise NotCaptured("there is no tokenizer to decode the text with: use `tokens`")
    return text


_FACTS: dict[str, Callable[[Debugger], Fact]] = {
    "step": lambda d: float(d.position.step),
    "branch": lambda d: float(d.position.branch),
    "rank": lambda d: float(d.last_stop.thread_id if d.last_stop else 0),
    "reason": lambda d: d.last_stop.reason if d.last_stop else "entry",
    "position": lambda d: float(_step_tokens(d).position),
    "token": _emitted,
    "kv_len": _kv_len,
    "golden": golden_verdict,
    "cause": _cause,
    "tokens": lambda d: [float(token) for token in _tokens(d)],
    "text": _text,
    "desync": lambda d: float(d.timeline.desync(d.position.branch, d.position.step) is not None),
    "origin": lambda d: find_origin(d, None).tap,
}  # fmt: skip


def _element(debugger: Debugger, tap: str, index: list[Any] | None, line: str) -> float:
    array, _ = whole_of(debugger, parts_of(debugger, tap))
    chosen = select(np.asarray(array), index, tap)
    if chosen.size != 1:
        raise CommandError(f"{tap} there has {chosen.size} elements: index one, or take a statistic", line)
    return float(chosen.reshape(-1)[0])


def _truth(value: Fact) -> bool:
    return bool(value)


def _number(value: Fact, line: str) -> float:
    if isinstance(value, float):
        return value
    raise CommandError(f"{clean(str(value), limit=40)!r} is no number", line)
