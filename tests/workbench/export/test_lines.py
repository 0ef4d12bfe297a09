"""Line charts: where points lie, and what has none."""

from __future__ import annotations

from xml.etree import ElementTree

from lockstep.workbench.export.lines import Panel, line_charts
from lockstep.workbench.export.svg import standalone

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_by_their_logarithms_and_names_are_escaped() -> None:
    panel = Panel("ms", "tokens", {"<us>": [(128, 1.0), (256, 10.0), (512, 100.0)], "them": [(128, 0.0)]})
    root = ElementTree.fromstring(standalone(line_charts([panel, Panel("MiB", "tokens", {})], "growth")))
    circles = [(float(one.get("cx") or 0), float(one.get("cy") or 0)) for one in root.iter(f"{SVG}circle")]
    assert len(circles) == 3  # nothing has no logarithm
    (x0, y0), (x1, y1), (x2, y2) = circles
    assert (round(x1 - x0, 1), round(y0 - y1, 1)) == (round(x2 - x1, 1), round(y1 - y2, 1))
    assert (y2 < y1 < y0, x0 < x1 < x2) == (True, True)
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert {"<us>", "them", "nothing was measured", "128", "512"} <= {*texts}
