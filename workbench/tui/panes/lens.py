"""The logit lens in the Logits pane: a layer a row, its candidates on grounds of their probability."""

from __future__ import annotations

from rich.style import Style

from lockstep.workbench.export.table import Table
from lockstep.workbench.tui.theme import Paint, mix
from lockstep.workbench.tui.widgets.grid import GridCell, GridColumn
from lockstep.workbench.views.candidates import Candidate
from lockstep.workbench.views.lens import Lens, LensLayer
from lockstep.workbench.views.logits import Logits
from lockstep.workbench.words.numbers import chance, fixed
from lockstep.workbench.words.plain_text import finite

LENS_COLUMNS = (
    GridColumn("after", 8),
    GridColumn("would choose", 12, flex=1),
    GridColumn("then", 10, flex=1, drop=1),
    GridColumn("then", 10, flex=1, drop=3),
    GridColumn("p", 12, right=True),
    GridColumn("H", 5, right=True),
    GridColumn("place", 5, right=True),
    GridColumn("golden", 10, flex=1, drop=2),
)


def lens_cells(layer: LensLayer, emitted: bool, styles: Paint) -> list[GridCell]:
    """Three candidates of a layer; `emitted`: the step emitted a token, of which the place is reported."""
    best = layer.candidates[0]
    shown: list[GridCell] = [(one.label, _ground(one, styles)) for one in layer.candidates[:3]]
    shown += [("", "quiet")] * (3 - len(shown))
    place = "" if not emitted else ">10" if layer.place is None else str(layer.place + 1)
    golden = layer.golden[0] if layer.golden else None
    agrees = golden is None or golden.token == best.token
    return [
        (layer.name, "quiet"),
        *shown,
        (chance(best.probability), "text" if finite(best.probability) else "wrong"),
        (fixed(layer.entropy, 2), "quiet"),
        (place, "strong" if layer.place == 0 else "quiet"),
        ("" if golden is None else golden.label, "quiet" if agrees else "wrong"),
    ]


def lens_line(found: Logits, layers: Lens) -> list[GridCell]:
    """Since when the layers agree with what came out."""
    settled = layers.settled
    reported = "the last layer has another first" if settled is None else f"first from {settled.name} on"
    how = "given" if found.forced else "chosen"
    return [(f"lens   {how} ", "quiet"), (layers.emitted or "nothing", "strong"), (f"   {reported}", "text")]


def lens_table(lens: Lens) -> Table:
    """Every candidate of every layer."""
    rows = tuple(
        (layer.tap, rank + 1, one.token, one.label, one.probability)
        for layer in lens.layers
        for rank, one in enumerate(layer.candidates)
    )
    return Table(f"logit lens of step {lens.step}", ("tap", "rank", "id", "token", "p"), rows)


def _ground(candidate: Candidate, styles: Paint) -> Style:
    """The surer, the clearer."""
    known = candidate.probability if finite(candidate.probability) else None
    share = round((known or 0.0) * 12) / 12 * 0.45
    colour = styles.accent.color
    tint = mix(styles.ground, colour.name if colour is not None else styles.ground, share)
    return (styles.strong if candidate.chosen else styles.text) + Style(bgcolor=tint)
