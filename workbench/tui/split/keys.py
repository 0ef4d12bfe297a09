"""The keys of the split view that every part has."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from lockstep.workbench.tui.split import PARTS
from lockstep.workbench.tui.widgets.key_bar import KeyHint

BINDINGS: list[BindingType] = [
    Binding("escape,q,vertical_line", "close", "Back"),
    Binding("n", "go(1)", "Both a token on"),
    Binding("N", "go(-1)", "Both a token back"),
    Binding("s", "within('layer', 1)", "Both into the next layer"),
    Binding("S", "within('layer', -1)", "Both into the layer before"),
    Binding("i", "within('operation', 1)", "Both an operation on"),
    Binding("I", "within('operation', -1)", "Both an operation back"),
    Binding("right_square_bracket", "scrub(1)", "Look a step ahead"),
    Binding("left_square_bracket", "scrub(-1)", "Look a step back"),
    Binding("full_stop", "neighbour(1)", "Next layer"),
    Binding("comma", "neighbour(-1)", "Layer before"),
    Binding("right_parenthesis", "sequence(1)", "Next sequence"),
    Binding("left_parenthesis", "sequence(-1)", "Sequence before"),
    Binding("o", "parting", "First different token"),
    Binding("w", "other", "Another other side"),
    Binding("a", "fill", "What a side lacks"),
    Binding("y", "copy", "Copy"),
    Binding("e", "export", "Export"),
    Binding("question_mark", "help", "Help"),
    Binding("ctrl+c", "interrupt", "Interrupt", priority=True),
    *(Binding(str(i), f"part({i})", part.TITLE) for i, part in enumerate(PARTS, 1)),
]
#: With what they do, for the help sheet.
KEYS = (
    ("n N", "step both sides; live, the engine runs"),
    ("s S", "both into the next layer, back"),
    ("i I", "both an operation on, back"),
    ("[ ]", "look a step back, ahead"),
    ("o", "the first different token"),
    ("w", "another other side"),
    ("( )", "another sequence of a batch"),
    ("1 … 4", "the parts"),
    (", .", "same operation, layer before, next layer"),
    ("a", "compute what a side lacks"),
    ("y e", "copy, export"),
    ("| esc", "back"),
)
HINTS = (
    KeyHint("n N", "step both", "n"),
    KeyHint("s i", "layer, op", "i"),
    KeyHint("[ ]", "look", "right_square_bracket"),
    KeyHint("o", "first difference", "o"),
)
FILL, OTHER_SIDE = KeyHint("a", "compute missing", "a"), KeyHint("w", "other side", "w")
PINNED = (KeyHint("?", "help", "question_mark"), KeyHint("esc", "back", "escape"))
