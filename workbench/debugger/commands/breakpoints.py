"""Breakpoints, watchpoints, catchpoints."""

from __future__ import annotations

from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Message, Result
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.core.tensors import rank_of
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.language import expressions
from lockstep.workbench.debugger.stops.breakpoints import AT_TAPS, SENTINELS, Breakpoint
from lockstep.workbench.words.plain_text import plural

NUMBER = Argument("number", "breakpoint", help="a breakpoint's number; none: all of them")
WHERE = Argument(
    "where", "text", required=True, form="LOCATION [if CONDITION] [rank R]", help="taps, and when"
)


@command(
    "break", "b", "br", arguments=(WHERE,), group="breaking", changes=True,
    key=Key("b", "breakpoint at this operation"),
    help="stop at taps",
    details="`break layers.3.attn.* if step >= 12 and absmax > 50`, `break logits rank 1`, `break layers.2`. The"
    " condition speaks of the tap's statistics (min max mean rms absmax nan inf zeros) and of step, rank, token,"
    " position, kv_len (rows that the tap's layer has cached: `if kv_len != position + 1`), in a batch those of the"
    " sequence that is chosen when it is set; it is evaluated where the tap is.",
)  # fmt: skip
def break_(debugger: Debugger, where: str) -> Result:
    """A breakpoint."""
    return _break(debugger, where, temporary=False)


@command(
    "tbreak", "tb", arguments=(WHERE,), group="breaking", changes=True,
    help="stop at taps, once",
)  # fmt: skip
def tbreak(debugger: Debugger, where: str) -> Result:
    """A breakpoint that goes with its first stop."""
    return _break(debugger, where, temporary=True)


@command(
    "watch", "w", arguments=(
        Argument("what", "text", required=True, form="TAP-GLOB PREDICATE [rank R]", help="taps, and what of them"),
    ),
    group="breaking", changes=True,
    help="stop where a tap's statistics meet a predicate",
    details="`watch layers.*.attn.q_proj absmax > 50`.",
)  # fmt: skip
def watch(debugger: Debugger, what: str) -> Result:
    """A watchpoint."""
    rest, rank = rank_of(debugger, what)
    glob, _, predicate = rest.partition(" ")
    if not predicate.strip():
        raise CommandError("watch wants a predicate: for example `watch layers.*.attn.q_proj absmax > 50`")
    made = debugger.breakpoints.add(
        "watch", what.strip(), places=frozenset(debugger.timeline.places.matching(glob)), rank=rank,
        seq=debugger.sequence, when=expressions.parse_condition(predicate.strip()), condition=predicate.strip(),
    )  # fmt: skip
    return _set(made)


@command(
    "catch", arguments=(Argument("sentinel", "word", required=True, choices=SENTINELS),), group="breaking",
    changes=True,
    help="stop when something goes wrong: nan, inf, desync, golden, repetition, eos, error",
    details="nan, inf and desync (replicas that differ between ranks) stop where they begin: at an operation whose"
    " output has it though nothing that it is computed from has. They stop once for each beginning, not at all that is"
    " computed from it, nor in the steps that have it again; what is gone for a step and comes back is new, and so is"
    " another rank, and what a motion without stops (`goto`, a toggle) has passed. nan and inf are judged at every"
    " tap, the -inf of a correct mask aside; desync, golden, repetition and eos after each step; error turns the loss"
    " of a rank into a stop, so that a script goes on (`restart` starts the engine again). On screen `catch nan` and"
    " `catch desync` are set when a model is started (`catch` in config.toml); `lockstep run` and scripts begin with"
    " none.",
)  # fmt: skip
def catch(debugger: Debugger, sentinel: str) -> Result:
    """A catchpoint."""
    if sentinel == "golden" and debugger.settings.golden is None and not debugger.session.verdicts():
        raise CommandError("there is no golden reference yet: `golden` records one")
    at_taps = sentinel in AT_TAPS
    made = debugger.breakpoints.add(
        "catch", sentinel,
        places=frozenset(range(len(debugger.timeline.places))) if at_taps else frozenset(),
        when=_sentinel(sentinel) if at_taps else None,
        inputs=dict(enumerate(debugger.timeline.places.flow.inputs)) if at_taps else {},
    )  # fmt: skip
    return _set(made)


@command(
    "condition", arguments=(
        Argument("number", "breakpoint", required=True), Argument("expression", "text", help="none: always"),
    ),
    group="breaking", changes=True, help="change a breakpoint's condition",
)  # fmt: skip
def condition(debugger: Debugger, number: str, expression: str | None) -> Result:
    """Another condition."""
    one = _get(debugger, number)
    if not one.places:
        raise CommandError(f"{one.describe()} looks at whole steps and takes no condition")
    when = expressions.parse_condition(expression) if expression else None
    if one.kind == "catch":
        when = _sentinel(one.what) if when is None else ["and", _sentinel(one.what), when]
    one.when, one.seq = when, debugger.sequence
    one.condition = expression or ""
    return Message(f"{one.describe()} {'if ' + one.condition if one.condition else 'stops always'}")


@command(
    "ignore", arguments=(
        Argument("number", "breakpoint", required=True), Argument("count", "int", required=True),
    ),
    group="breaking", changes=True, help="let a breakpoint's next COUNT hits pass",
)  # fmt: skip
def ignore(debugger: Debugger, number: str, count: int) -> Result:
    """So many hits without stopping."""
    one = _get(debugger, number)
    if count < 0:
        raise CommandError(f"the count must be at least 0, not {count}")
    one.ignore = count
    return Message(f"the next {plural(count, 'hit')} of {one.describe()} will not stop")


@command("enable", arguments=(NUMBER,), group="breaking", changes=True, help="let breakpoints stop again")
def enable(debugger: Debugger, number: str | None) -> Result:
    """Switch on."""
    return _switch(debugger, number, True)


@command(
    "disable", arguments=(NUMBER,), group="breaking", changes=True, help="keep breakpoints from stopping"
)
def disable(debugger: Debugger, number: str | None) -> Result:
    """Switch off."""
    return _switch(debugger, number, False)


@command("delete", "d", arguments=(NUMBER,), group="breaking", changes=True, help="forget breakpoints")
def delete(debugger: Debugger, number: str | None) -> Result:
    """Forget one, or all."""
    chosen = [_get(debugger, number)] if number else list(debugger.breakpoints)
    for one in chosen:
        debugger.breakpoints.delete(one.id)
    return Message(f"deleted {', '.join(one.describe() for one in chosen) or 'nothing'}")


@command(
    "commands", arguments=(
        Argument("block", "text", required=True, form="NUMBER … end", help="then a command a line, then end"),
    ),
    group="breaking", changes=True,
    help="what to do when a breakpoint stops",
)  # fmt: skip
def commands_(debugger: Debugger, block: str) -> Result:
    """Commands that run at each stop."""
    first, *lines = [line.strip() for line in block.splitlines()]
    one = _get(debugger, first)
    if not lines or lines[-1] != "end":
        raise CommandError("commands NUMBER, a command a line, and `end`")
    one.commands = [line for line in lines[:-1] if line]
    return Message(f"{one.describe()} runs {plural(len(one.commands), 'command')} when it stops")


def _sentinel(name: str) -> expressions.Tree:
    """The condition of a sentinel at a tap."""
    return [">", ["name", name], 0.0]


def _break(debugger: Debugger, where: str, *, temporary: bool) -> Result:
    rest, rank = rank_of(debugger, where)
    location, _, condition = rest.partition(" ")
    word, _, text = condition.strip().partition(" ")
    if word not in ("", "if") or (word and not text.strip()):
        wrong = "a condition follows `if`" if word == "if" else f"unexpected {clean(word, limit=40)!r}"
        raise CommandError(
            f"{wrong}: LOCATION [if CONDITION] [rank R]", where, where.find(word, len(location))
        )
    places = debugger.timeline.places.matching(location)
    made = debugger.breakpoints.add(
        "break", location, places=frozenset(places), rank=rank, seq=debugger.sequence, temporary=temporary,
        when=expressions.parse_condition(text.strip()) if word else None, condition=text.strip(),
    )  # fmt: skip
    return _set(made)


def _set(made: Breakpoint) -> Message:
    taps = f" at {plural(len(made.places), 'tap')}" if made.places else ""
    condition = f" if {made.condition}" if made.condition and made.kind == "break" else ""
    return Message(f"{made.describe()}{condition}{taps}", {"id": made.id, "places": sorted(made.places)})


def _get(debugger: Debugger, number: str) -> Breakpoint:
    if not number.isdigit():
        raise CommandError(f"a breakpoint has a number: {number!r} is none")
    return debugger.breakpoints.get(int(number))


def _switch(debugger: Debugger, number: str | None, on: bool) -> Message:
    chosen = [_get(debugger, number)] if number else list(debugger.breakpoints)
    for one in chosen:
        one.enabled = on
    state = "enabled" if on else "disabled"
    return Message(f"{state} {', '.join(one.describe() for one in chosen) or 'nothing'}")
