"""The debugger's day in a real terminal: a bug seen, found, undone, recorded, replayed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.e2e.terminal import Terminal, needs_tmux

pytestmark = needs_tmux

_HAIKU = "soft│ rain│ on│ tin│ roofs│⏎│a│ child│ whispers│ z│or│bl│at│"
_BROKEN = "soft│ rain│⏎│the│ gutters│⏎│"


def _row(shown: str, title: str) -> str:
    """The tokens of the branch that `title` names, in the strip; "" while it is not there."""
    row = next((line for line in shown.splitlines() if line.startswith(f" {title} ")), "")
    return re.sub(r" +│", "│", row)  # cells of two branches are as wide as the wider one


def _wait_for_rows(here: Terminal, **rows: str) -> str:
    """Wait until the branch of each name shows these tokens; the screen then."""
    titles = {title.replace("_is_", "="): tokens for title, tokens in rows.items()}
    return here.until(
        lambda shown: all(tokens in _row(shown, title) for title, tokens in titles.items()),
        lambda shown: f"the tokens are not {titles}",
    )


def test_a_bug_is_seen_found_undone_and_replayed(terminals: Callable[..., Terminal]) -> None:
    here = terminals()
    before = here.line_discipline()
    here.start("lockstep tui demo --tp 2 --save story.session")
    here.wait("● stopped", "step 0/0", "faults  none")
    here.enter(":next 60")  # to the end of the text
    here.wait("end of the text", _HAIKU)

    # The bug: the biases of q, k and v are not loaded. Chosen from the catalogue, with the keys.
    here.enter(":goto 0")
    here.wait("step 0/")
    here.type("x")
    here.until(lambda shown: "load_bias=false" in shown and "enter switches" in shown)
    for _ in range(4):
        here.press("Down")
    here.wait("shows first at layers.*.attn.q_proj")
    here.press("Enter")
    here.wait("faults  load_bias=false", "switched on", "branch load_bias=false")
    here.wait(re.compile(r"differs from main at step 2: “⏎” instead of “ on”"), re.compile(r"step 2/\d\d"))
    _wait_for_rows(here, main=_HAIKU[:20], load_bias_is_false=_BROKEN)

    # Undone: the right text again, beside the broken one.
    here.enter(":toggle load_bias true")
    here.wait("faults  none", "back on branch 0 (main)", "branch main")
    _wait_for_rows(here, main=_HAIKU[:20], load_bias_is_false=_BROKEN)
    # Any size: what was there is there again.
    here.resize(80, 24)
    here.wait("● stopped", "^q quit")
    here.resize(20, 5)
    here.until(lambda shown: max(map(len, shown.splitlines())) <= 20 and shown.strip())
    here.resize(200, 60)
    here.wait("● stopped", "first difference at step", "attn.scores")
    here.resize(120, 40)

    # Another one: NaN, caught where it first appears, and its origin.
    here.enter(":branch main")
    here.wait("branch main")
    here.enter(":goto 0")
    here.wait("step 0/")
    here.enter(":toggle mask additive")
    here.wait("faults  mask=additive", "differs from main at step")
    here.type("n")  # nobody asked for it: `catch nan` is set from the beginning
    here.wait(re.compile(r"catch 1, nan: step \d+, at layers\.0\.attn\.scores"))
    here.wait(re.compile(r"NaN in step \d+, from layers\.0\.attn\.scores on, rank 0 1: 0 × -inf in the mask"))
    here.type("o")
    here.wait(re.compile(r"layers\.0\.attn\.scores at step \d+ is the first"))
    here.enter(":next 6")  # on past hundreds of taps with NaN in each step
    here.wait("step 7/", "● stopped")
    here.press("C-q")
    here.back_in_shell()
    assert (here.code(), here.line_discipline()) == (0, before)
    here.nothing_is_left()

    _the_recording_shows_the_same(here)


@pytest.mark.slow
def test_a_toggle_is_seen_beside_what_it_changed(terminals: Callable[..., Terminal]) -> None:
    """The split view, live: the token strips under each other, the first operation that differs, both stepped."""
    here = terminals()
    here.start("lockstep tui demo --tp 2")
    here.wait("● stopped", "step 0/0")
    here.enter(":toggle load_bias false")
    here.wait("branch load_bias=false", "differs from main at step 2")
    here.type("|")
    shown = here.wait("step 2: first difference, “⏎” and “ on”", "● layers.0.attn.q_proj")
    lines = shown.splitlines()
    assert lines[1].startswith(" load_bias=false ")
    assert lines[2].startswith(" main ")
    tokens = [re.sub(r" +│", "│", line) for line in lines[1:3]]
    assert _BROKEN[:16] in tokens[0]
    assert _HAIKU[:20] in tokens[1]
    assert lines[3].index("▲") == lines[1].rindex("│ rain│") + len("│ rain│"), (
        "under the first different token"
    )
    assert "operations differ beyond rounding, the first: layers.0.attn.q_proj" in shown
    # A tensor that neither side has is computed again on both.
    here.press("Enter")
    here.wait(
        "layers.0.attn.q_proj 1×", "rel L2", re.compile(r"load_bias=false -?\d.* main -?\d.* difference -?\d")
    )
    # Both are stepped, and the shorter one is run on.
    here.type("1")
    for _ in range(8):
        here.type("n")
    here.wait("step 10  of 10", "different tokens went in from step 3 on")
    here.type("o")
    here.wait("● layers.0.attn.q_proj")
    here.press("Escape")
    here.wait("step 2/10", "8 Journal")
    here.press("C-q")
    here.back_in_shell()
    here.nothing_is_left()


def _the_recording_shows_the_same(here: Terminal) -> None:
    here.start("lockstep tui story.session")
    here.wait("replay  branch main", "8 Journal")
    assert not here.of("lockstep.workbench.cli.host"), "nothing runs behind a replay"
    here.enter(":branch load_bias=false")
    here.wait("faults  load_bias=false", "first difference at step")
    here.enter(":goto 0")
    _wait_for_rows(here, main=_HAIKU[:20], load_bias_is_false=_BROKEN)
    here.enter(":goto 12")
    here.wait("step 12/")
    here.enter(":branch mask=additive")
    here.wait("faults  mask=additive", "NaN")
    here.type("o")
    here.wait(re.compile(r"layers\.0\.attn\.scores at step \d+ is the first"))
    here.type("8")
    here.wait("toggle load_bias false", "toggle mask additive")
    here.press("C-q")
    here.back_in_shell()
    here.nothing_is_left()
