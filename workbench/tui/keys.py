"""The keys of the workbench: those of the debugger's commands, which the registry declares, and those that only change
the view. One table for the bindings, the footer, the help sheet and the palette."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from textual.binding import Binding
from textual.keys import format_key

from lockstep.workbench.debugger.core.registry import Command
from lockstep.workbench.tui.panes.titles import TITLES, digit
from lockstep.workbench.tui.widgets.key_bar import KeyHint


@dataclass(frozen=True, slots=True)
class ScreenKey:
    """A key: Textual's name for it, the screen's action, what it does, its word in the footer, the action's name in the
    settings, which of a command's key is the command's, and what line that runs. `needs_model`: it does nothing in a
    replay."""

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
        return shown(self.press)


#: The panes, by their numbers.
PANE_KEYS = tuple(
    ScreenKey(
        digit(number),
        f"view('pane', {number})",
        f"the {title} pane",
        name=f"pane-{title.lower().replace(' ', '-')}",
    )
    for number, title in enumerate(TITLES, 1)
)
VIEW_KEYS = (
    *PANE_KEYS,
    ScreenKey("left_square_bracket", "view('scrub', -1)", "look a step back", name="look-back"),
    ScreenKey("right_square_bracket", "view('scrub', 1)", "look a step ahead", name="look-ahead"),
    ScreenKey(
        "left_curly_bracket", "view('stop_event', -1)", "look at the stop before", name="look-at-stop-before"
    ),
    ScreenKey(
        "right_curly_bracket", "view('stop_event', 1)", "look at the next stop", name="look-at-next-stop"
    ),
    ScreenKey(
        "equals_sign", "view('return_to_stop')", "look where the debugger stands", name="look-at-debugger"
    ),
    ScreenKey("comma", "view('layer', -1)", "same operation, layer before", name="layer-before"),
    ScreenKey("full_stop", "view('layer', 1)", "same operation, next layer", name="layer-after"),
    ScreenKey(
        "left_parenthesis", "view('sequence', -1)", "the sequence before, of a batch", name="sequence-before"
    ),
    ScreenKey(
        "right_parenthesis", "view('sequence', 1)", "the next sequence of a batch", name="sequence-after"
    ),
    ScreenKey("R", "view('rank')", "one rank, then the next, then all", name="next-rank"),
    ScreenKey("w", "view('compare')", "two branches, token for token", name="compare-branches"),
    ScreenKey("T", "view('token_colour')", "tokens by p, entropy or divergence", name="token-colour"),
    ScreenKey(
        "a", "view('fill')", "have what this pane lacks captured", name="capture-pane", needs_model=True
    ),
    ScreenKey("z", "view('zoom')", "the pane alone, and back", name="zoom"),
    ScreenKey("y", "view('copy')", "copy the pane", name="copy-pane"),
    ScreenKey("e", "view('export')", "export the pane to a file", name="export-pane"),
    ScreenKey("colon", "view('command_line')", "command line", name="command-line", footer="command"),
    ScreenKey("question_mark", "view('help')", "help of the pane", name="help-pane"),
)

#: The order in the footer, the help sheet and the palette; keys that are not named here follow.
_ORDER = "1234567890nNsSiIcCf[]{}=(),.Rw|TxbBgoazye:?"


def keys_of(commands: Iterable[Command]) -> tuple[ScreenKey, ...]:
    """All keys as they are without any settings, in the order in which they are shown."""
    found = [
        ScreenKey(
            key.press, f"command_key({one.name!r})", key.what, key.footer, one.name, key.line or one.name
        )
        for one in commands
        if (key := one.key) is not None
    ]
    return tuple(sorted((*VIEW_KEYS, *found), key=_place))


@dataclass(frozen=True, slots=True)
class UserKeys:
    """The keys under the user's settings, and what of the settings cannot be."""

    keys: tuple[ScreenKey, ...]
    problems: tuple[str, ...]
    moved: Mapping[str, ScreenKey]  # by the key that an action has without settings, the one that it has


def user_keys(
    commands: Sequence[Command], chosen: Mapping[str, Sequence[str]], taken: Mapping[str, str]
) -> UserKeys:
    """The keys where `chosen` gives actions others. An action is a name of `keys_of`, or a command line. `taken`: keys
    that are others', and whose. Before the commands are known nothing is reported as unknown."""
    known = {one.name: one for one in keys_of(commands)}
    words = {word: one for one in commands for word in (one.name, *one.aliases)}
    problems: list[str] = []
    own: list[ScreenKey] = []
    for action, names in chosen.items():
        key, command = known.get(action), words.get(action.partition(" ")[0])
        if key is None and command is not None:
            key = ScreenKey("", f"command_key({action!r})", command.help, name=action, line=action)
        if key is None:
            problems += (
                [f"{action}: no such action or command; `?` and `:help` list them"] if commands else []
            )
            continue
        for press in map(normal, names):
            clash = next((one.name for one in own if one.press == press), taken.get(press))
            if clash is None:
                own.append(replace(key, press=press))
            else:
                problems.append(f"{action}: {shown(press)} is the key of {clash} already")
    pressed = {one.press: one for one in own}
    rest = [one for name, one in known.items() if name not in chosen]
    for one in rest:
        if one.press in pressed:
            problems.append(
                f"{pressed[one.press].name}: {one.shown} was the key of {one.name}, which has none now"
            )
    order = {one.name: _place(one) for one in known.values()}
    kept = [*own, *(one for one in rest if one.press not in pressed)]
    kept.sort(key=lambda one: order.get(one.name, len(_ORDER)))
    moved = {known[one.name].press: one for one in reversed(own) if one.name in known}
    return UserKeys(tuple(kept), tuple(problems), moved)


def normal(press: str) -> str:
    """Textual's name of a key that may be given as the character that it types."""
    return next(iter(Binding.make_bindings([Binding(press, "none")]))).key


def shown(press: str) -> str:
    """A key as it is printed."""
    return format_key(press).replace("ctrl+", "^")


def _place(key: ScreenKey) -> int:
    return _ORDER.index(key.shown) if key.shown in _ORDER else len(_ORDER)


def reference(keys: Sequence[ScreenKey]) -> list[tuple[str, str]]:
    """Every key with what it does, for the help sheet."""
    usual = set(PANE_KEYS) <= set(keys)
    rows = [(key.shown, key.what) for key in keys if not usual or key not in PANE_KEYS]
    panes = [("1 … 9 0", "the panes")] * usual
    return [*panes, *rows, ("^p", "palette of everything"), ("^z", "suspend"), ("^q", "quit")]


def footer(keys: Sequence[ScreenKey]) -> list[KeyHint]:
    """The hints at the foot of the screen that every pane has."""
    return [KeyHint(key.shown, key.footer, key.press) for key in keys if key.footer]


#: At the right edge of every footer.
PINNED = (KeyHint("?", "help", "question_mark"), KeyHint("^q", "quit", "ctrl+q"))
