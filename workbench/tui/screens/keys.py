"""The workbench's keys: one table for the bindings, the footer, the help and the palette."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding

#: Why an action that runs the model does nothing in a replay.
REPLAY = "this is a replay: nothing runs here (lockstep tui MODEL runs one)"


@dataclass(frozen=True, slots=True)
class Key:
    """A key: Textual's name for it, as it is shown, the action, what it does, and the debugger's command
    for it (in a live session it is that command that acts). `engine`: it needs a model that runs."""

    key: str
    shown: str
    action: str
    what: str
    command: str = ""
    engine: bool = False
    footer: str = ""


KEYS: tuple[Key, ...] = (
    Key("n", "n", "move('token', 1)", "next token", "next", footer="next"),
    Key("N", "N", "move('token', -1)", "previous token", "reverse-next", footer="back"),
    Key("s", "s", "move('layer', 1)", "into the next layer", "step", footer="layer"),
    Key("S", "S", "move('layer', -1)", "back into the layer before", "reverse-step"),
    Key("i", "i", "move('operation', 1)", "one operation", "stepi", footer="op"),
    Key("I", "I", "move('operation', -1)", "one operation back", "reverse-stepi"),
    Key("c", "c", "move('stop', 1)", "continue to the next stop", "continue", footer="continue"),
    Key("C", "C", "move('stop', -1)", "back to the stop before", "reverse-continue"),
    Key("f", "f", "move('finish', 1)", "finish the layer", "finish"),
    Key("left_square_bracket", "[", "scrub(-1)", "look a step back"),
    Key("right_square_bracket", "]", "scrub(1)", "look a step ahead"),
    Key("left_curly_bracket", "{", "stop_event(-1)", "look at the stop before"),
    Key("right_curly_bracket", "}", "stop_event(1)", "look at the next stop"),
    Key("comma", ",", "layer(-1)", "same operation, layer before"),
    Key("full_stop", ".", "layer(1)", "same operation, next layer"),
    Key("R", "R", "rank", "one rank, then the next, then all"),
    Key("w", "w", "compare", "two branches, token for token"),
    Key("T", "T", "token_colour", "tokens by probability, entropy, divergence"),
    Key("x", "x", "toggles", "toggles: known bugs, on and off", footer="toggles"),
    Key("b", "b", "break_here", "breakpoint at this operation", "break"),
    Key("B", "B", "breakpoints", "list the breakpoints", "info breakpoints"),
    Key("g", "g", "golden", "compare with the golden reference", "golden", footer="golden"),
    Key("o", "o", "origin", "walk back to where it went wrong", "origin"),
    Key("a", "a", "fill", "have what this pane lacks captured", engine=True),
    Key("z", "z", "zoom", "the pane alone, and back"),
    Key("y", "y", "copy", "copy the pane"),
    Key("e", "e", "export", "export the pane to a file"),
    Key("colon", ":", "command", "command line", footer="command"),
    Key("question_mark", "?", "help", "help of the pane"),
    Key("ctrl+c", "^c", "interrupt", "interrupt what runs", "interrupt"),
)


#: Keys that do nothing without a model that runs.
ENGINE_ONLY = frozenset(key.key for key in KEYS if key.engine)


def bindings() -> list[Binding]:
    """The keys as Textual takes them."""
    return [Binding(key.key, key.action, key.what, show=False, priority=key.key == "ctrl+c") for key in KEYS]


def reference() -> list[tuple[str, str]]:
    """Every key with what it does, for the help sheet."""
    rows = [("1 … 8", "the panes")]
    rows += [(key.shown, key.what) for key in KEYS]
    return [*rows, ("^p", "palette of everything"), ("^z", "suspend"), ("^q", "quit")]
