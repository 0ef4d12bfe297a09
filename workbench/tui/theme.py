"""Colours, one meaning each: what is wrong, the present step, the four ranks; everything else is quiet.

A theme is Textual's; `Paint` is the same theme as Rich styles for the widgets that draw their own lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.color import Color
from rich.style import Style
from textual.app import App
from textual.theme import Theme

from lockstep.workbench.export import palette
from lockstep.workbench.export.palette import RANK_HUES

#: Roles of the palette that Textual does not have by another name.
_OURS = (*RANK_HUES, "wrong", "quiet", "dim", "faint", "trace", "raised", "cursor")


def _theme(name: str, dark: bool, colours: Mapping[str, str]) -> Theme:
    """A Textual theme of our roles; the widgets of Textual get theirs from the same few colours."""
    return Theme(
        name=name,
        dark=dark,
        primary=colours["accent"],
        secondary=colours["rank-0"],
        accent=colours["accent"],
        warning=colours["wrong"],
        error=colours["wrong"],
        success=colours["rank-1"],
        foreground=colours["text"],
        background=colours["ground"],
        surface=colours["ground"],
        panel=colours["raised"],
        variables={
            **{key: colours[key] for key in _OURS},
            "border": colours["faint"],
            "border-blurred": colours["faint"],
            "block-cursor-background": colours["cursor"],
            "block-cursor-foreground": colours["text"],
            "block-cursor-text-style": "none",
            "block-cursor-blurred-background": colours["cursor"],
            "block-cursor-blurred-foreground": colours["text"],
            "block-hover-background": colours["raised"],
            "footer-background": colours["ground"],
            "footer-foreground": colours["quiet"],
            "footer-key-foreground": colours["text"],
            "footer-description-foreground": colours["quiet"],
            "scrollbar": colours["faint"],
            "scrollbar-hover": colours["quiet"],
            "scrollbar-active": colours["quiet"],
            "scrollbar-background": colours["ground"],
            "scrollbar-background-hover": colours["ground"],
            "scrollbar-background-active": colours["ground"],
            "scrollbar-corner-color": colours["ground"],
            "input-cursor-background": colours["text"],
            "input-selection-background": colours["cursor"],
        },
    )


DARK = _theme("lockstep-dark", True, palette.DARK)
LIGHT = _theme("lockstep-light", False, palette.LIGHT)
THEMES = (DARK, LIGHT)


@dataclass(frozen=True, slots=True)
class Paint:
    """A theme's roles as Rich styles, for Line API widgets. Backgrounds only where a role needs one."""

    dark: bool
    ground: str
    text: Style
    strong: Style
    quiet: Style
    faint: Style  # dimmed text
    edge: Style  # lines between things
    trace: Style
    accent: Style
    wrong: Style
    alarm: Style  # wrong, and not to be overlooked
    worn: Style  # wrong, but not by its own doing: what went in was wrong already
    present: Style
    cursor: Style
    raised: Style
    ranks: tuple[Style, ...]

    def rank(self, rank: int) -> Style:
        """The hue of a rank; four hues, then again from the first."""
        return self.ranks[rank % len(self.ranks)]

    def style(self, role: str | Style) -> Style:
        """The style of a role: a field's name, "rank0" and so on, or a style itself."""
        if isinstance(role, Style):
            return role
        if role.startswith("rank"):
            return self.rank(int(role[4:] or 0))
        style: Style = getattr(self, role)
        return style


def mix(ground: str, tint: str, share: float) -> Color:
    """The colour `share` of the way from one `#rrggbb` to another."""
    pairs = zip(Color.parse(ground).get_truecolor(), Color.parse(tint).get_truecolor(), strict=True)
    return Color.from_rgb(*(round(g + (t - g) * share) for g, t in pairs))


def _paint(theme: Theme) -> Paint:
    colours = theme.variables
    ground, text = str(theme.background), str(theme.foreground)
    return Paint(
        dark=theme.dark,
        ground=ground,
        text=Style(color=text),
        strong=Style(color=text, bold=True),
        quiet=Style(color=colours["quiet"]),
        faint=Style(color=colours["dim"]),
        edge=Style(color=colours["faint"]),
        trace=Style(color=colours["trace"]),
        accent=Style(color=str(theme.accent)),
        wrong=Style(color=colours["wrong"]),
        alarm=Style(color=ground, bgcolor=colours["wrong"], bold=True),
        # As pale as it can be read under the cursor, which is nearer to it where the ground is light.
        worn=Style(color=mix(ground, colours["wrong"], 0.72 if theme.dark else 0.78)),
        present=Style(color=ground, bgcolor=str(theme.accent), bold=True),
        cursor=Style(bgcolor=colours["cursor"]),
        raised=Style(bgcolor=colours["raised"]),
        ranks=tuple(Style(color=colours[name]) for name in RANK_HUES),
    )


_PAINTS = {theme.name: _paint(theme) for theme in THEMES}


def paint(app: App[object]) -> Paint:
    """The present theme's styles. A theme that is not ours gets our roles in its shade."""
    ours = _PAINTS.get(app.theme)
    return ours or _PAINTS[(DARK if app.current_theme.dark else LIGHT).name]
