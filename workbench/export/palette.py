"""The colours of both grounds, one meaning each: what is wrong, the present step, the four ranks; the rest is quiet.

Text and bars are never below a contrast of 3 to their ground (WCAG 2.2, 1.4.11): `dim` is the dimmest text, `trace` the
dimmest bars, `faint` is for lines.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Names of the ranks' hues; rank 4 has the hue of rank 0 again.
RANK_HUES = ("rank-0", "rank-1", "rank-2", "rank-3")

DARK: Mapping[str, str] = {
    "ground": "#14171c",
    "raised": "#1c2027",
    "cursor": "#2a313c",
    "text": "#ccd3dc",
    "quiet": "#828d9b",
    "dim": "#707a89",
    "faint": "#343b46",
    "trace": "#626c7d",
    "accent": "#5cc8d7",
    "wrong": "#ff7a66",
    "rank-0": "#86a6cf",
    "rank-1": "#98b98d",
    "rank-2": "#b99ac4",
    "rank-3": "#cbb083",
}
LIGHT: Mapping[str, str] = {
    "ground": "#fbfaf7",
    "raised": "#f1efe9",
    "cursor": "#e0e4e6",
    "text": "#262b33",
    "quiet": "#666c75",
    "dim": "#7b7e80",
    "faint": "#d3d0c8",
    "trace": "#858782",
    "accent": "#0a7286",
    "wrong": "#c2321f",
    "rank-0": "#426aa3",
    "rank-1": "#4c7c40",
    "rank-2": "#84528f",
    "rank-3": "#8d6a22",
}


def css_variables() -> str:
    """Both palettes as CSS custom properties; the reader's system chooses the ground, and paper is light."""
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in palette.items()) for palette in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
