"""One parameter over the whole screen: the checkpoint's values, each rank's share, the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.tui.reader import Reader
from workbench.tui.screens.tensor import TensorScreen
from workbench.tui.widgets.status_line import Fact
from workbench.tui.widgets.text_block import TextLine
from workbench.views.overview import Overview
from workbench.views.tensor import Tensor
from workbench.views.weight_tensor import RankArrays, weight_tensor
from workbench.views.where import Where


class WeightScreen(TensorScreen):
    """A parameter. `held` are the shares of the running ranks, where there are any."""

    CSS_PATH = TensorScreen.CSS_PATH

    def __init__(self, reader: Reader, overview: Overview, where: Where, name: str, held: RankArrays) -> None:
        super().__init__(reader, overview, where, "checkpoint")
        self.parameter, self.held = name, held

    def question(self) -> tuple[Callable[..., Tensor], Sequence[object]]:
        """A view of the parameter."""
        return weight_tensor, (self.parameter, self.view, self.held)

    def missing(self, found: Tensor) -> list[TextLine]:
        """Why there are no values."""
        return [[(found.note or "these values cannot be shown", "quiet")]]

    def place(self) -> tuple[Fact, ...]:
        """Whose weights these are."""
        return (Fact(f"branch {self.overview.branch(self.where.branch).name}", "text"),)

    async def action_step(self, by: int) -> None:
        """A parameter is the same at every step."""
