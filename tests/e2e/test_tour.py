"""The tour of docs/screens.md, taken in a real terminal: after each row's keys, all that it names is on screen."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.e2e.terminal import PATIENCE, Terminal, needs_tmux
from tests.e2e.tour import NAMED, TourStep, tour

pytestmark = [needs_tmux, pytest.mark.slow, pytest.mark.timeout(900)]

#: Seconds that the golden reference may take on a busy machine; what is waited for ends the waiting.
_LONG = 300.0
_MOST_REPEATS = 40


def _press(here: Terminal, key: str) -> None:
    if key in NAMED:
        here.press(NAMED[key])
    else:
        here.type(key)


def _at_rest(here: Terminal) -> str:
    """The screen, once it has stopped changing: what was pressed has had its effect."""
    shown = here.text()
    while True:
        time.sleep(0.2)
        before, shown = shown, here.text()
        if shown == before:
            return shown


def _take(here: Terminal, step: TourStep) -> None:
    for key in step.keys:
        _press(here, key)
    for _ in range(_MOST_REPEATS if step.repeated else 0):
        if all(text in _at_rest(here) for text in step.seen):
            break
        _press(here, step.keys[-1])
    here.wait(*step.seen, seconds=_LONG if "g" in step.keys else PATIENCE)


def test_the_tour_shows_what_it_states(terminals: Callable[..., Terminal]) -> None:
    here = terminals()
    here.start("lockstep tui demo --tp 2")
    here.wait("● stopped", "step 0/0", "8 Journal")
    for step in tour():
        _take(here, step)
    here.press("Escape", "C-q")
    here.back_in_shell()
    assert here.code() == 0
    here.nothing_is_left()
