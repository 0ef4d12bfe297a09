"""Commands that look and change nothing: where, frame, topk, attn, display."""

from __future__ import annotations

import numpy as np

from sessions.records import STATISTICS
from sessions.text import clean
from workbench.debugger.answers import Message, Result, TableResult
from workbench.debugger.core.debugger import Debugger
from workbench.debugger.core.motion import require_step
from workbench.debugger.core.registry import Argument, command, parse_line
from workbench.debugger.core.tensors import parts_of, rank_of, statistics_at, whole_of
from workbench.debugger.errors import CommandError
from workbench.views.attention import row_figures
from workbench.views.candidates import candidates
from workbench.views.plain_text import plural


@command("where", "bt", "backtrace", group="looking", help="where the debugger stands")
def where(debugger: Debugger) -> Result:
    """Position, tokens, rules."""
    at, timeline = debugger.position, debugger.timeline
    line, last = timeline.line(at.branch), timeline.last(at.branch)
    stop = debugger.stop("", "")
    state = "before step 0" if at.step < 0 else f"step {at.step}"
    if at.step > last:
        state += " (under way)"
    elif at.step < last:
        state += f" (the last is {last})"
    told = debugger.step_tokens()
    read = None if told is None else debugger.texts.label(told.read)
    tokens = "no token yet" if read is None else f'reads "{read}" at position {stop.position}'
    if stop.token is not None:
        tokens += f', emits "{stop.token}"'
    rules = clean(" ".join(f"{name}={value}" for name, value in line.rules.items())) or "correct"
    mode = "live" if debugger.live else "replay" if debugger.executor is None else "engine lost"
    text = [
        f"{state}{f', at {clean(stop.tap)}' if stop.tap else ''}, branch {line.id} ({clean(line.name)})",
        tokens,
        f"rules {rules}; {mode}",
    ]
    return Message("\n".join(text), {
        "branch": at.branch, "step": at.step, "tap": stop.tap or None, "last": last,
        "position": stop.position, "reads": read, "token": stop.token, "rules": dict(line.rules),
        "live": debugger.live,
    })  # fmt: skip


@command(
    "frame", "fr", arguments=(
        Argument("what", "text", form="TAP [rank R]", help="default: the present tap, every rank"),
    ),
    group="looking", help="an operation's statistics on every rank",
)  # fmt: skip
def frame(debugger: Debugger, what: str | None) -> Result:
    """Statistics of one tap, a row a rank."""
    at = require_step(debugger)
    places = debugger.timeline.places
    tap, rank = rank_of(debugger, what or "")
    place = places.matching(tap)[0] if tap else at.place if at.place is not None else len(places) - 1
    found = enumerate(statistics_at(debugger, place))
    rows = [[each, *values] for each, values in found if rank in (None, each)]
    return TableResult(f"{clean(places.names[place])}, step {at.step}", ["rank", *STATISTICS], rows)


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
        for one in candidates(told, debugger.texts, max(0, count)):
            chosen = "←" if one.chosen else ""
            rows.append([told.seq, one.token, one.label, one.logit, one.probability, chosen])
    return TableResult(
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
    if array.ndim != 3 or 0 in array.shape:
        raise CommandError(f"{tap} has shape {array.shape}: attention is [heads, queries, keys]")
    if not 0 <= head < array.shape[0]:
        raise CommandError(f"there is no head {head}: heads are 0 to {array.shape[0] - 1}")
    row = np.asarray(array[head, -1], dtype=np.float64)
    found = row_figures(row)
    strongest = np.argsort(-np.nan_to_num(row, nan=-1.0), kind="stable")[:count]
    texts = _position_tokens(debugger, len(row))
    rows = [[int(p), float(row[p]), texts[p] if p < len(texts) else None] for p in strongest]
    title = (
        f"layer {layer} head {head}, step {debugger.position.step}: row sum {found.total:.6g}, "
        f"entropy {found.entropy:.4g}, attends to {found.attended} of {len(row)} positions"
    )
    return TableResult(
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
    return [debugger.texts.label(token) for token in ids[:count]]


@command(
    "display", arguments=(Argument("line", "text", help="a looking command, e.g. `print logits[0, :4]`; none: list"),),
    group="looking", help="carry out a looking command after every stop",
)  # fmt: skip
def display(debugger: Debugger, line: str | None) -> Result:
    """Add a display."""
    shown = debugger.settings.displays
    if line is None:
        rows = [[number, text] for number, text in enumerate(shown, 1)]
        return TableResult("", ["number", "display"], rows, empty="nothing is displayed")
    spec, _ = parse_line(line)
    if spec.group != "looking" or spec.name == "display":
        raise CommandError(f"display repeats a looking command; {spec.name} is none")
    result = debugger.execute(line)  # what cannot be shown is not displayed
    shown.append(line)
    return result


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
    return Message(f"{plural(len(shown), 'display')} left")
