"""Moving about in what was recorded: by token, layer, operation, stop; by step, rank and layer of the view."""

from __future__ import annotations

from dataclasses import replace

from textual.reactive import var

from workbench.tui.reader import Reader
from workbench.tui.screens import moves
from workbench.tui.screens.exporting import Exporting
from workbench.views.overview import Overview, Present
from workbench.views.sentinels import stops
from workbench.views.where import Where


class Moving(Exporting):
    """A screen that looks at a place of a session, `where`."""

    reader: Reader
    present: Present | None
    overview: var[Overview | None] = var(None)  # no `reactive`: what stands around is not drawn anew
    where: var[Where] = var(Where())
    inside = False  # whether the last move led into the middle of a step

    async def action_move(self, kind: str, by: int) -> None:
        """n N s S i I c C f: in a replay they move about in what was recorded."""
        await self.move(kind, by)

    async def move(self, kind: str, by: int, times: int = 1) -> None:
        """Move `times` by a token, layer, operation or stop."""
        if self.overview is None or self.present is None:
            return
        taps, steps = self.overview.taps, self.present.steps
        where = self.where
        self.inside = kind in ("layer", "operation", "finish")
        for _ in range(min(times, 100_000)):
            before = where
            where = await self._moved(where, kind, by, taps, steps)
            if where == before:
                self.tell(f"nothing further: the branch has steps {steps.start} to {steps.stop - 1}")
                break
        self.where = where

    async def _moved(self, where: Where, kind: str, by: int, taps: tuple[str, ...], steps: range) -> Where:
        if kind == "token":
            return replace(where, step=min(max(where.step + by, steps.start), steps.stop - 1))
        if kind == "operation":
            return moves.next_operation(taps, where, by, steps)
        if kind == "layer":
            return moves.next_layer(taps, where, by, steps)
        if kind == "finish":
            return moves.end_of_layer(taps, where)
        step = await self._stop_beside(where, by)
        return where if step is None else replace(where, step=step)

    async def _stop_beside(self, where: Where, by: int) -> int | None:
        found = await self.reader.ask(lambda source: stops(source.session, where.branch))
        return moves.next_stop([(event.branch, event.step) for event in found], where, by)

    def action_scrub(self, by: int) -> None:
        """[ and ]: look at another step; nothing runs."""
        if self.present is not None:
            self.inside, steps = False, self.present.steps
            self.where = replace(self.where, step=min(max(self.where.step + by, steps.start), steps.stop - 1))

    async def action_stop_event(self, by: int) -> None:
        """{ and }: look at the stop before, or the next one."""
        step = await self._stop_beside(self.where, by)
        if step is None:
            self.tell("no stop before this one" if by < 0 else "no further stop on this branch")
        else:
            self.where = replace(self.where, step=step)

    def action_layer(self, by: int) -> None:
        """, and .: the same operation of a neighbouring layer."""
        if self.overview is not None:
            self.where = moves.same_operation(self.overview.taps, self.where, by)

    def action_rank(self) -> None:
        """R: one rank, then the next, then all."""
        if self.overview is not None:
            self.where = moves.next_rank(self.where, self.overview.ranks)
            self.tell("all ranks" if self.where.rank is None else f"rank {self.where.rank} alone")
