"""Commands that look and change nothing: where, frame, print, x, topk, attn, display, rank apply all."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from sessions.records import STATISTICS
from sessions.text import clean
from workbench.debugger import expressions
from workbench.debugger.debugger import Debugger
from workbench.debugger.errors import CommandError
from workbench.debugger.facts import evaluate_fact
from workbench.debugger.motion import require_step
from workbench.debugger.reading import parts_of, select, statistics_at, whole_of
from workbench.debugger.registry import Argument, command, parse_line
from workbench.debugger.values import Group, Message, Result, Table, TensorValue

_RANK = re.compile(r"^rank\s+(\d+)$")
#: Elements that `x` shows unless told.
_EXAMINED = 16


@command("where", "bt", "backtrace", group="looking", help="where the debugger stands")
def where(debugger: Debugger) -> Result:
    """Position, token, rules."""
    at, timeline = debugger.position, debugger.timeline
    line = timeline.line(at.branch)
    stop = debugger.stop("", "")
    rules = " ".join(f"{name}={value}" for name, value in line.rules.items()) or "correct"
    step = "before step 0" if at.step < 0 else f"step {at.step} of {timeline.last(at.branch)}"
    text = [
        f"{step}{f', at {stop.tap}' if stop.tap else ''}, branch {line.id} ({clean(line.name)})",
        f"position {stop.position}, token {stop.token}" if stop.position is not None else "no token yet",
        f"rules {rules}; {'live' if debugger.live else 'replay' if debugger.executor is None else 'engine lost'}",
    ]
    return Message("\n".join(text), {
        "branch": at.branch, "step": at.step, "tap": stop.tap or None, "last": timeline.last(at.branch),
        "position": stop.position, "token": stop.token, "rules": dict(line.rules), "live": debugger.live,
    })  # fmt: skip


@command(
    "frame", "fr", arguments=(Argument("tap", "location", help="default: the present one"),), group="looking",
    help="an operation's statistics on every rank",
)  # fmt: skip
def frame(debugger: Debugger, tap: str | None) -> Result:
    """Statistics of one tap, a row a rank."""
    at = require_step(debugger)
    places = debugger.timeline.places
    place = places.matching(tap)[0] if tap else at.place if at.place is not None else len(places) - 1
    rows = [[rank, *values] for rank, values in enumerate(statistics_at(debugger, place))]
    return Table(f"{places.names[place]}, step {at.step}", ["rank", *STATISTICS], rows)


@command(
    "print", "p", arguments=(Argument("what", "text", required=True, help="TAP[index] [rank R], or an expression"),),
    group="looking", help="a tensor or a part of it, or the value of an expression",
    details="`print layers.0.attn.q_proj[0, :8]` shows the tensor as one rank alone would have had it; `… rank 1`"
    " what that rank holds; `print nan(layers.0.attn.scores) + 1` a value. A live run computes again what was not"
    " captured; a replay says how to have it captured.",
)  # fmt: skip
def print_(debugger: Debugger, what: str) -> Result:
    """A tensor or a value."""
    name, index, rest = _reference(what)
    if name is None or name not in debugger.timeline.places.names:
        return _print_value(debugger, what)
    match = _RANK.match(rest)
    if rest and match is None:
        return _print_value(debugger, what)
    return tensor_value(debugger, name, index, int(match[1]) if match else None)


def tensor_value(
    debugger: Debugger, tap: str, index: list[Any] | None, rank: int | None, seq: int = 0
) -> TensorValue:
    """A tap's tensor at the present step: rebuilt, or one rank's."""
    parts = parts_of(debugger, tap, seq=seq)
    if rank is None:
        array, note = whole_of(debugger, parts)
    elif rank in parts.by_rank:
        array, note = parts.by_rank[rank], f"only [{parts.part}] was captured" if parts.part else ""
    else:
        raise CommandError(f"there is no rank {rank}: ranks are 0 to {debugger.timeline.ranks - 1}")
    chosen = select(array, index, tap)
    return TensorValue(tap, parts.step, rank, expressions.show_index(index), chosen, parts.source, note)


def _print_value(debugger: Debugger, what: str) -> Result:
    value = evaluate_fact(debugger, expressions.parse(what), what)
    shown = f"{value:g}" if isinstance(value, float) else clean(str(value))
    return Message(f"{what} = {shown}", {"value": value})


def _reference(what: str) -> tuple[str | None, list[Any] | None, str]:
    try:
        return expressions.parse_reference(what)
    except CommandError:
        return None, None, ""


@command(
    "x", arguments=(Argument("what", "text", required=True, help="TAP[index] [rank R]"),), group="looking",
    help="the first elements of a tensor, with their bits",
)  # fmt: skip
def examine(debugger: Debugger, what: str) -> Result:
    """Numbers and bits, a row an element."""
    name, index, rest = expressions.parse_reference(what)
    match = _RANK.match(rest)
    if rest and match is None:
        raise CommandError(f"x TAP[index] [rank R], not {clean(rest, limit=40)!r}", what, what.find(rest))
    value = tensor_value(debugger, name, index, int(match[1]) if match else None)
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
    return Table(
        f"{value.tap}{value.index}, step {value.step}, {value.array.dtype}", ["index", "value", "bits"], rows
    )


@command(
    "topk", arguments=(Argument("count", "int", default=5),), group="looking",
    help="the likeliest next tokens of this step",
)  # fmt: skip
def topk(debugger: Debugger, count: int) -> Result:
    """Tokens, logits and probabilities."""
    at = require_step(debugger)
    if at.step > debugger.timeline.last(at.branch):
        raise CommandError(f"step {at.step} is not finished: `next` finishes it")
    rows = []
    for told in debugger.timeline.record(at.branch, at.step).sequences:
        for rank, (token, logit) in enumerate(zip(told.topk_ids, told.topk_logits, strict=True)):
            if rank < count:
                known = told.logsumexp is not None
                probability = (
                    math.exp(logit - told.logsumexp) if known and told.logsumexp is not None else None
                )
                chosen = "←" if token == told.emitted else ""
                rows.append([told.seq, token, debugger.token_text(token), logit, probability, chosen])
    return Table(
        f"step {at.step}", ["sequence", "id", "token", "logit", "probability", ""], rows,
        empty="no top-k was recorded",
    )  # fmt: skip


@command(
    "attn", arguments=(
        Argument("layer", "int", required=True), Argument("head", "int", required=True),
        Argument("count", "int", default=8, help="how many positions"),
    ),
    group="looking", help="what a head attends to: row sum, entropy, the strongest positions",
)  # fmt: skip
def attn(debugger: Debugger, layer: int, head: int, count: int) -> Result:
    """The last token's row of attention probabilities of one (global) head."""
    tap = f"layers.{layer}.attn.probs"
    array, note = whole_of(debugger, parts_of(debugger, tap, whole=False))
    if not 0 <= head < array.shape[0]:
        raise CommandError(f"there is no head {head}: heads are 0 to {array.shape[0] - 1}")
    row = np.asarray(array[head, -1], dtype=np.float64)
    positive = row[row > 0]
    entropy = float(-(positive * np.log(positive)).sum())
    strongest = np.argsort(-np.nan_to_num(row, nan=-1.0), kind="stable")[:count]
    texts = _position_tokens(debugger, len(row))
    rows = [[int(p), float(row[p]), texts[p] if p < len(texts) else None] for p in strongest]
    title = (
        f"layer {layer} head {head}, step {debugger.position.step}: row sum {row.sum():.6g}, "
        f"entropy {entropy:.4g}, attends to {len(positive)} of {len(row)} positions"
    )
    return Table(
        f"{title}; {note}" if note and "only" not in note else title,
        ["position", "probability", "token"],
        rows,
    )


def _position_tokens(debugger: Debugger, count: int) -> list[str]:
    """The token at each position of sequence 0."""
    at = debugger.position
    ids: list[int] = []
    for step in range(min(at.step, debugger.timeline.last(at.branch)) + 1):
        told = debugger.timeline.sequence(at.branch, step)
        ids += list(told.ids) if told is not None else []
    return [debugger.token_text(token) for token in ids[:count]]


@command(
    "display", arguments=(Argument("line", "text", help="a looking command, e.g. `print logits[0, :4]`; none: list"),),
    group="looking", help="carry out a looking command after every stop",
)  # fmt: skip
def display(debugger: Debugger, line: str | None) -> Result:
    """Add a display."""
    shown = debugger.settings.displays
    if line is None:
        rows = [[number, text] for number, text in enumerate(shown, 1)]
        return Table("", ["number", "display"], rows, empty="nothing is displayed")
    spec, _ = parse_line(line)
    if spec.group != "looking" or spec.name == "display":
        raise CommandError(f"display repeats a looking command; {spec.name} is none")
    shown.append(line)
    return debugger.execute(line)


@command(
    "undisplay", arguments=(Argument("number", "int", help="none: all"),), group="looking",
    help="stop displaying",
)  # fmt: skip
def undisplay(debugger: Debugger, number: int | None) -> Result:
    """Take a display away."""
    shown = debugger.settings.displays
    if number is None:
        shown.clear()
    elif 1 <= number <= len(shown):
        del shown[number - 1]
    else:
        raise CommandError(f"there is no display {number}")
    return Message(f"{len(shown)} displays left")


@command(
    "rank", arguments=(Argument("rest", "text", required=True, help="apply all COMMAND"),), group="looking",
    help="carry out print or x for every rank: rank apply all print TAP",
)  # fmt: skip
def rank_apply(debugger: Debugger, rest: str) -> Result:
    """One answer a rank."""
    match = re.match(r"apply\s+(all|\d+(?:\s*,\s*\d+)*)\s+(.+)$", rest)
    if match is None:
        raise CommandError("rank apply all COMMAND, or rank apply 0,1 COMMAND")
    ranks = range(debugger.timeline.ranks)
    chosen = ranks if match[1] == "all" else [int(one) for one in match[1].split(",")]
    if any(rank not in ranks for rank in chosen):
        raise CommandError(f"ranks are 0 to {debugger.timeline.ranks - 1}")
    return Group([debugger.execute(f"{match[2]} rank {rank}") for rank in chosen])
