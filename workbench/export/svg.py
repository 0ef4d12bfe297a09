"""SVG elements: everything foreign is escaped, numbers are short. Colours come by class from one style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from lockstep.workbench.export.palette import DARK, LIGHT, RANK_HUES

#: Classes that every figure uses; as a sheet of its own for figures outside a page.
STYLE = "\n".join(
    [
        "text { font: 11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: var(--quiet); }",
        "text.strong { fill: var(--text); }",
        "text.wrong { fill: var(--wrong); font-weight: 600; }",
        "text.glyph { fill: var(--ground); font-weight: 700; }",
        "image { image-rendering: pixelated; }",
        ".grid { stroke: var(--faint); stroke-width: 1; fill: none; }",
        ".line { stroke: var(--text); stroke-width: 1.5; fill: none; stroke-linejoin: round; }",
        ".floor { stroke: var(--trace); stroke-width: 1.25; fill: none; stroke-dasharray: 3 3; }",
        ".dot { fill: var(--text); }",
        ".dot.wrong, .mark { fill: var(--wrong); }",
        ".ring { stroke: var(--wrong); stroke-width: 1.5; fill: none; }",
        ".now { stroke: var(--accent); stroke-width: 1; fill: none; }",
        *(
            f".{name} {{ stroke: var(--{name}); stroke-width: 1.25; fill: none; stroke-linejoin: round; }}"
            for name in RANK_HUES
        ),
    ]
)


def el(name: str, *children: object, **attributes: object) -> Markup:
    """An element. A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens;
    None leaves the attribute out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(child if isinstance(child, Markup) else escape(str(child)) for child in children)
    # The tag's name is ours; everything else went through escape.
    return Markup(f"<{name}{written}>{inside}</{name}>") if inside else Markup(f"<{name}{written}/>")


def _value(value: object) -> str:
    return short(value) if isinstance(value, float) else str(value)


def short(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def path_of(points: Sequence[tuple[float, float] | None]) -> str:
    """The `d` of a line through the points; None lifts the pen. A lone point becomes a dot's width."""
    parts: list[str] = []
    down = False
    for i, point in enumerate(points):
        if point is None:
            down = False
            continue
        parts.append(f"{'L' if down else 'M'}{short(point[0])} {short(point[1])}")
        if not down and (i + 1 == len(points) or points[i + 1] is None):
            parts.append("h.5")
        down = True
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of `width` × `height` units; `label` is for screen readers."""

    width: float
    height: float
    label: str
    content: Markup

    @classmethod
    def of(cls, width: float, height: float, label: str, *children: Markup) -> Picture:
        """A picture of elements."""
        return cls(width, height, label, Markup("").join(children))

    def at(self, x: float, y: float) -> Markup:
        """The drawing as a part of another."""
        return el("g", self.content, transform=f"translate({short(x)} {short(y)})")

    def __html__(self) -> str:
        """The figure in a page: it shrinks with the page, never grows."""
        return el(
            "svg",
            self.content,
            class_="figure",
            viewBox=f"0 0 {short(self.width)} {short(self.height)}",
            width=float(self.width),
            height=float(self.height),
            role="img",
            aria_label=self.label,
        )


def standalone(picture: Picture, *, dark: bool = False) -> str:
    """A picture as a file of its own, with its ground and its colours."""
    palette = DARK if dark else LIGHT
    sheet = STYLE
    for name, colour in palette.items():  # few viewers of SVG know custom properties
        sheet = sheet.replace(f"var(--{name})", colour)
    document = el(
        "svg",
        el("title", picture.label),
        el("style", Markup(sheet)),
        el("rect", width="100%", height="100%", fill=palette["ground"]),
        picture.content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {short(picture.width)} {short(picture.height)}",
        width=float(picture.width),
        height=float(picture.height),
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{document}\n'
