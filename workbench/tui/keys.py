"""The keys of the workbench: those of the debugger's commands, which the registry declares, and those that only change
the view. One table for the bindings, the footer, the help sheet and the palette."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.debugger.core.registry import Command
from workbench.tui.widgets.key_bar import KeyHint

_SHOWN = {
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "left_parenthesis": "(",
    "right_parenthesis": ")",
    "comma": ",",
    "full_stop": ".",
    "colon": ":",
    "equals_sign": "=",
    "question_mark": "?",
}


@dataclass(frozen=True, slots=True)
class ScreenKey:
    """A key: Textual's name for it, the screen's action, what it does, its word in the footer; of a command's key the
    command's name and line. `needs_model`: it does nothing in a replay."""

    press: str
    action: str
    what: str
    footer: str = ""
    name: str = ""
    line: str = ""
    needs_model: bool = False

    @property
    def shown(self) -> str:
        """As it is printed."""
        return _SHOWN.get(self.press, self.press.replace("ctrl+", "^"))


VIEW_KEYS = (
    ScreenKey("left_square_bracket", "view('scrub', -1)", "look a step back"),
    ScreenKey("right_square_bracket", "view('scrub', 1)", "look a step ahead"),
    ScreenKey("left_curly_bracket", "view('stop_event', -1)", "look at the stop before"),
    ScreenKey("right_curly_bracket", "view('stop_event', 1)", "look at the next stop"),
    ScreenKey("equals_sign", "view('return_to_stop')", "look where the debugger stands"),
    ScreenKey("comma", "view('layer', -1)", "same operation, layer before"),
    ScreenKey("full_stop", "view('layer', 1)", "same operation, next layer"),
    ScreenKey("left_parenthesis", "view('sequence', -1)", "the sequence before, of a batch"),
    ScreenKey("right_parenthesis", "view('sequence', 1)", "the next sequence of a batch"),
    ScreenKey("R", "view('rank')", "one rank, then the next, then all"),
    ScreenKey("w", "view('compare')", "two branches, token for token"),
    ScreenKey("T", "view('token_colour')", "tokens by probability, entropy, divergence"),
    ScreenKey("a", "view('fill')", "have what this pane lacks captured", needs_model=True),
    ScreenKey("z", "view('zoom')", "the pane alone, and back"),
    ScreenKey("y", "view('copy')", "copy the pane"),
    ScreenKey("e", "view('export')", "export the pane to a file"),
    ScreenKey("colon", "view('command_line')", "command line", footer="command"),
    ScreenKey("question_mark", "view('help')", "help of the pane"),
)

#: The order in the footer, the help sheet and the palette; keys that are not named here follow.
_ORDER = "nNsSiIcCf[]{}=(),.RwTxbBgoazye:?"


def keys_of(commands: Iterable[Command]) -> tuple[ScreenKey, ...]:
    """All keys, in the order in which they are shown."""
    found = [
        ScreenKey(
            key.press, f"command_key({one.name!r})", key.what, key.footer, one.name, key.line or one.name
        )
        for one in commands
        if (key := one.key) is not None
    ]
    return tuple(sorted((*VIEW_KEYS, *found), key=_place))


def _place(key: ScreenKey) -> int:
    return _ORDER.index(key.shown) if key.shown in _ORDER else len(_ORDER)


def reference(keys: Sequence[ScreenKey]) -> list[tuple[str, str]]:
    """Every key with what it does, for the help sheet."""
    rows = [("1 … 9", "the panes"), *((key.shown, key.what) for key in keys)]
    return [*rows, ("^p", "palette of everything"), ("^z", "suspend"), ("^q", "quit")]


def footer(keys: Sequence[ScreenKey]) -> list[KeyHint]:
    """The hints at the foot of the screen that every pane has."""
    return [KeyHint(key.shown, key.footer, key.press) for key in keys if key.footer]


#: At the right edge of every footer.
PINNED = (KeyHint("?", "help", "question_mark"), KeyHint("^q", "quit", "ctrl+q"))
