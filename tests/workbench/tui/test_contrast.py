"""Whatever is written or drawn as a bar has a contrast of 3 to its ground (WCAG 2.2, 1.4.11), in every pane."""

from __future__ import annotations

import pytest
from rich.style import Style

from lockstep.workbench.paths import find_session
from lockstep.workbench.tui.theme import DARK, LIGHT, paint
from tests.workbench.tui.conftest import Bench, press

THEMES = pytest.mark.parametrize("theme", [DARK.name, LIGHT.name])


@THEMES
async def test_the_dimmest_styles_can_be_read(bench: Bench, theme: str) -> None:
    async with bench(theme=theme) as pilot:
        styles = paint(pilot.app)
        grounds = (Style(bgcolor=styles.ground), styles.raised, styles.cursor)
        for style in (styles.faint, styles.quiet, styles.worn):
            assert all(_contrast(ground + style) >= 3 for ground in grounds)
        assert all(_contrast(ground + styles.trace) >= 3 for ground in grounds[:2])


@pytest.mark.sampled(5)
@THEMES
@pytest.mark.parametrize("keys", ["1", "2", "3", "4", "5", "6", "7", "8", "x", "question_mark"])
async def test_no_word_on_the_screen_is_too_pale(bench: Bench, theme: str, keys: str) -> None:
    async with bench(path=find_session("gallery/load_bias-false"), theme=theme) as pilot:
        await press(pilot, keys)
        screen = pilot.app.screen
        widgets = [one for one in screen.walk_children() if one.display and not one.children]
        shown = [
            segment
            for widget in widgets
            for strip in widget.render_lines(widget.size.region)
            for segment in strip
            if any(map(str.isalnum, segment.text)) and segment.style is not None
        ]
        assert len(shown) > 20
        pale = {segment.text.strip() for segment in shown if _contrast(segment.style) < 3}
        assert not pale


def _contrast(style: Style) -> float:
    """The contrast ratio of a text to its ground; that of a text without colours is the terminal's."""
    if style.color is None or style.bgcolor is None or style.color.is_default or style.bgcolor.is_default:
        return 21
    colours = (style.color.get_truecolor(), style.bgcolor.get_truecolor())
    darker, lighter = sorted(map(_luminance, colours))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: tuple[int, int, int]) -> float:
    parts = (value / 255 for value in colour)
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
