"""Commands that look and change nothing: where, frame, topk, attn, display."""

from __future__ import annotations

import numpy as np

from lockstep.sessions.records import STATISTICS
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Message, Result, TableResult
from lockstep.workbench.debugger.core.batch import batch_of, finished_step, sequence_of, titled
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.core.registry import Argument, command, parse_line
from lockstep.workbench.debugger.core.step_tokens import sequences_at
from lockstep.workbench.debugger.core.tensors import parts_of, rank_of, statistics_at, whole_of
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.views.attention import row_figures
from lockstep.workbench.views.branches import engine_name
from lockstep.workbench.views.candidates import candidates
from lockstep.workbench.views.sequences import of_all
from lockstep.workbench.words.numbers import cell, scalar
from lockstep.workbench.words.plain_text import plural


@command("where", "bt", "backtrace", group="inspection", help="where the debugger stands")
def where(debugger: Debugger) -> Result:
    """Position, tokens, faults."""
    at, timeline = debugger.position, debugger.timeline
    line, last = timeline.line(at.branch), timeline.last(at.branch)
    stop = debugger.stop("", "")
    state = "before step 0" if at.step < 0 else f"step {at.step}"
    if at.step > last:
        state += " (under way)"
    elif at.step < last:
        state += f" (the last is {last})"
    reported, batch = debugger.step_tokens(), batch_of(debugger)
    read = None if reported is None else debugger.texts.label(reported.read)
    if read is not None:
        which = f"{batch.label(debugger.sequence)} " if batch.several else ""
        tokens = f'{which}reads "{read}" at position {stop.position}'
    else:
        tokens = "no token yet" if at.step < 0 else batch.why_absent(debugger.sequence, at.step)
    if stop.token is not None:
        tokens += f', emits "{stop.token}"'
    faults = clean(" ".join(f"{name}={value}" for name, value in line.rules.items())) or "none"
    engine = engine_name(debugger.session)
    mode = "live" if debugger.live else "replay" if debugger.executor is None else "engine lost"
    text = [
        f"{state}{f', at {clean(stop.tap)}' if stop.tap else ''}, branch {line.id} ({clean(line.name)})",
        tokens,
        f"{f'recorded from {engine}' if engine else f'faults {faults}'}; {mode}",
    ]
    return Message("\n".join(text), {
        "branch": at.branch, "step": at.step, "sequence": debugger.sequence, "tap": stop.tap or None, "last": last,
        "position": stop.position, "reads": read, "token": stop.token, "faults": dict(line.rules),
        "live": debugger.live,
    })  # fmt: skip


@command(
    "frame", "fr", arguments=(
        Argument("what", "text", form="TAP [rank R]", help="default: the present tap, every rank"),
    ),
    group="inspection", help="an operation's statistics on every rank",
)  # fmt: skip
def frame(debugger: Debugger, what: str | None) -> Result:
    """Statistics of one tap, a row a rank."""
    at = require_step(debugger)
    places = debugger.timeline.places
    tap, rank = rank_of(debugger, what or "")
    place = places.matching(tap)[0] if tap else at.place if at.place is not None else len(places) - 1
    found = enumerate(statistics_at(debugger, place))
    rows = [[each, *values] for each, values in found if rank in (None, each)]
    whole = of_all(len(sequences_at(debugger.timeline, at, debugger.flight)))
    title = f"{clean(places.names[place])}, step {at.step}{f', {whole}' if whole else ''}"
    return TableResult(title, ["rank", *STATISTICS], rows)


@command(
    "topk", arguments=(Argument("what", "text", form="COUNT] [seq S", help="default: 5"),), group="inspection",
    help="the likeliest next tokens of this step",
)  # fmt: skip
def topk(debugger: Debugger, what: str | None) -> Result:
    """Tokens, logits and probabilities."""
    text, seq = sequence_of(debugger, what or "")
    count, reported = _count(text, 5), finished_step(debugger, seq)
    rows = [
        [one.token, one.label, one.logit, one.probability, "←" if one.chosen else ""]
        for one in candidates(reported, debugger.texts, count)
    ]
    title = titled(debugger, f"step {debugger.position.step}", seq)
    return TableResult(
        title, ["id", "token", "logit", "probability", ""], rows, empty="no top-k was recorded"
    )


def _count(text: str, default: int) -> int:
    if text and not text.isdecimal():
        raise CommandError(f"{clean(text, limit=40)!r} is no number: [COUNT] [seq S]")
    return int(text) if text else default


@command(
    "attn", arguments=(
        Argument("layer", "int", required=True), Argument("head", "int", required=True),
        Argument("what", "text", form="COUNT] [seq S", help="how many positions; default: 8"),
    ),
    group="inspection", help="what a head attends to: row sum, entropy, the strongest positions",
)  # fmt: skip
def attn(debugger: Debugger, layer: int, head: int, what: str | None) -> Result:
    """The last token's row of attention probabilities of one (global) head."""
    tap = f"layers.{layer}.attn.probs"
    text, seq = sequence_of(debugger, what or "")
    count = _count(text, 8)
    array, note = whole_of(debugger, parts_of(debugger, tap, seq=seq, whole=False))
    if array.ndim != 3 or 0 in array.shape:
        raise CommandError(f"{tap} has shape {array.shape}: attention is [heads, queries, keys]")
    if not 0 <= head < array.shape[0]:
        raise CommandError(f"there is no head {head}: heads are 0 to {array.shape[0] - 1}")
    row = np.asarray(array[head, -1], dtype=np.float64)
    found = row_figures(row)
    strongest = np.argsort(-np.nan_to_num(row, nan=-1.0), kind="stable")[:count]
    texts = _position_tokens(debugger, seq, len(row))
    rows = [[int(p), float(row[p]), texts[p] if p < len(texts) else None] for p in strongest]
    title = titled(debugger, f"layer {layer} head {head}, step {debugger.position.step}", seq)
    title = (
        f"{title}: row sum {scalar(found.total)}, "
        f"entropy {cell(found.entropy)}, attends to {found.attended} of {len(row)} positions"
    )
    return TableResult(
        f"{title}; {note}" if note and "only" not in note else title,
        ["position", "probability", "token"],
        rows,
    )


def _position_tokens(debugger: Debugger, seq: int, count: int) -> list[str]:
    """The token at each position of a sequence."""
    at = debugger.position
    ids: list[int] = []
    for step in range(min(at.step, debugger.timeline.last(at.branch)) + 1):
        reported = debugger.timeline.sequence(at.branch, step, seq)
        ids += list(reported.ids) if reported is not None else []
    return [debugger.texts.label(token) for token in ids[:count]]


@command(
    "display",
    arguments=(Argument("line", "text", help="an inspection command, e.g. `print logits[0, :4]`; none: list"),),
    group="inspection", help="carry out an inspection command after every stop",
)  # fmt: skip
def display(debugger: Debugger, line: str | None) -> Result:
    """Add a display."""
    shown = debugger.settings.displays
    if line is None:
        rows = [[number, text] for number, text in enumerate(shown, 1)]
        return TableResult("", ["number", "display"], rows, empty="nothing is displayed")
    spec, _ = parse_line(line)
    if spec.group != "inspection" or spec.name == "display":
        raise CommandError(f"display repeats an inspection command; {spec.name} is none")
    result = debugger.execute(line)  # what cannot be shown is not displayed
    shown.append(line)
    return result


@command(
    "undisplay", arguments=(Argument("number", "int", help="none: all"),), group="inspection",
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
