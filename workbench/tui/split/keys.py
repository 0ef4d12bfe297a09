"""The keys of the split view that every part has."""

from __future__ import annotations

from workbench.tui.widgets.key_bar import KeyHint

#: With what they do, for the help sheet.
KEYS = (
    ("n N", "step both sides; live, the engine runs"),
    ("[ ]", "look a step back, ahead"),
    ("o", "the first different token"),
    ("w", "another other side"),
    ("( )", "another sequence of a batch"),
    ("1 … 4", "the parts"),
    (", .", "layer before, next layer"),
    ("a", "compute what a side lacks"),
    ("y e", "copy, export"),
    ("| esc", "back"),
)
HINTS = (
    KeyHint("n N", "step both", "n"),
    KeyHint("[ ]", "look", "right_square_bracket"),
    KeyHint("o", "first difference", "o"),
)
FILL, OTHER_SIDE = KeyHint("a", "compute missing", "a"), KeyHint("w", "other side", "w")
PINNED = (KeyHint("?", "help", "question_mark"), KeyHint("esc", "back", "escape"))
