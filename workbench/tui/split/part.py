"""What the parts of the split view have in common: a pane that asks about two sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.sessions.errors import SessionError
from lockstep.workbench.paths import file_stem
from lockstep.workbench.tui.panes.base import Pane
from lockstep.workbench.views.sides import GOLDEN, Other


class SplitPart(Pane):
    """One part. The screen sets `other`, `parted` (see `views.sides`) and `names` before it has it look."""

    other: Other = 0
    parted: int | None = None
    names: tuple[str, str] = ("", "")

    def compared(self) -> tuple[Callable[..., Any], Sequence[object]]:
        """The view function, and its arguments after the place and the sides."""
        raise NotImplementedError

    def question(self) -> tuple[Callable[..., Any], Sequence[object]]:
        """The view function about both sides."""
        function, arguments = self.compared()
        return function, (self.other, self.parted, *arguments)

    def lacking(self) -> Sequence[tuple[str, str]]:
        """(side, tap) of the tensors that a side did not capture."""
        return ()

    def named(self, model: str) -> tuple[str, str]:
        """The title of a picture of it, and a file's name without the ending."""
        ours, theirs = self.names
        stem = file_stem(f"{ours}-{theirs}".replace("=", "-"))
        title = f"{model}: {ours} beside {theirs}, {self.TITLE.lower()}, step {self.where.step}"
        return title, f"{stem}-step{self.where.step}"

    def fetches(self) -> list[str]:
        """The debugger's commands that bring what is lacking. SessionError where none could."""
        sides = dict(zip(self.names, (self.where.branch, self.other), strict=True))
        found = []
        for side, tap in self.lacking():
            if sides[side] == GOLDEN:
                raise SessionError(
                    f"golden has no {tap} at this step: `golden` records it up to where the branch stands"
                )
            found.append(f"print {tap} seq {self.where.seq} step {self.where.step} branch {sides[side]}")
        return found

    def action_fill(self) -> None:
        """Have the debugger run the step again for what a side lacks."""
        try:
            lines = self.fetches()
        except SessionError as error:
            self.notify(str(error), severity="warning")
            return
        if not lines:
            self.notify("Nothing is missing here that a command could bring.")
        for line in lines:
            self.post_message(self.Command(line))
