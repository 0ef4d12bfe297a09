"""The layer that a view of one layer shows."""

from __future__ import annotations

from lockstep.engine.taps.names import layer_of
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where


def present_layer(source: SessionSource, where: Where, name: str) -> int:
    """The layer of the operation at `where`; where a step stands still at it and what is shown of the layer (`name`,
    a tap's within it) is still to come, the layer that has just passed. The first before the layers, the last after
    them."""
    taps = source.session.taps
    layers = [layer for tap in taps if (layer := layer_of(tap.name)) is not None]
    if not layers or where.tap >= len(taps):
        return 0
    layer = layer_of(taps[where.tap].name)
    if layer is None:
        return max(layers) if where.tap > 0 else 0
    flight, tap = source.under_way(where.branch, where.step), f"layers.{layer}.{name}"
    to_come = source.session.has_tap(tap) and source.session.tap(tap).index > where.tap
    return layer - (layer > 0 and to_come and flight is not None and flight.place == where.tap)
