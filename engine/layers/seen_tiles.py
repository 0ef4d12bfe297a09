"""What taps see of attention that is computed in tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.layers.tiles import Tile, Tiling
from lockstep.engine.layers.wiring import TapCallback


@dataclass(frozen=True, slots=True)
class AttendedSequence:
    """What one sequence of the batch attends with: q [kv_heads, group, T, D], k and v [kv_heads, 1 or group, K, D]; the
    D of v may be another. `chosen`: of each query the keys that it attends to, [T, K] bool; None: all that it sees."""

    index: int
    q: Tensor
    k: Tensor
    v: Tensor
    tiling: Tiling
    inputs: StepInputs
    chosen: Tensor | None = None

    def bias(self, tile: Tile, *, every_key: bool = False) -> Tensor | None:
        """What is added to the scores of a tile's last keys, or of every one, [queries, keys]; None where all of its
        keys are seen."""
        chosen = self.chosen
        bias = self.inputs.bias(self.index, self.tiling, tile, every_key=every_key or chosen is not None)
        if chosen is None:
            return bias
        own = chosen[tile.rows, tile.keys]
        bias = torch.zeros(own.shape, dtype=self.q.dtype, device=own.device) if bias is None else bias
        return bias.masked_fill(~own, -math.inf)


Compute = Callable[[Tile], Tensor]


def seen_tiles(
    tap: TapCallback | None, one: AttendedSequence, tiling: Tiling, outside: float, compute: Compute
) -> tuple[Compute, Tiling]:
    """What gives a tile once `tap` has seen the tensor [heads, T, K], and the tiles to ask it for. The tap takes it
    tile by tile while they are computed, or whole and before them, when it may change any cell: the mask then no
    longer shows which keys count. Cells that lie in no tile are `outside`."""
    if not tap:
        return compute, tiling
    if (only := tiling.only) is not None:
        x = compute(only).contiguous()
        tap(x.flatten(0, 1), one.index)
        return lambda tile: x, tiling.over_all_keys() if tap.changes else tiling
    sink = tap.tiles(one.index, tiling.shape, outside, one.q)
    if sink is None:
        whole = one.q.new_full((*one.q.shape[:3], tiling.keys), outside)
        for tile in tiling:
            whole[tile.heads, :, tile.rows, tile.keys] = compute(tile)
        tap(whole.flatten(0, 1), one.index)
        return lambda tile: whole[tile.heads, :, tile.rows, tile.keys], (
            tiling.over_all_keys() if tap.changes else tiling
        )

    def watched(tile: Tile) -> Tensor:
        x = compute(tile)
        sink.add(x.flatten(0, 1), tile.heads.start * tiling.group, tile.rows.start, tile.keys.start)
        return x

    return watched, tiling
