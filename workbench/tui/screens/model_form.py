"""Before a model is run: how many ranks, what prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Static

from lockstep.engine.text import printable
from lockstep.workbench.models.identify import Found
from lockstep.workbench.tui.screens.dialog import Dialog
from lockstep.workbench.tui.widgets.field import Field


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """How a model is to be run."""

    tp: int
    prompt: str


class ModelForm(Dialog[ModelChoice | None]):
    """Two fields. Enter in the last one starts, escape goes back."""

    CSS_PATH = "../styles/form.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close")]

    def __init__(self, found: Found) -> None:
        super().__init__()
        self._found = found

    def compose(self) -> ComposeResult:
        """What the model is, the ranks, the prompt."""
        with Vertical(id="form") as form:
            form.border_title = Content(printable(self._found.path.name))
            form.border_subtitle = "enter starts   esc goes back"
            yield Static(self._found.summary, id="summary", markup=False)
            yield Static("ranks (tp)", classes="label")
            yield Field("2" if 2 in self._found.tps else "1", id="tp", type="integer", compact=True)
            yield Static("prompt", classes="label")
            yield Field("", placeholder="what the model is to continue", id="prompt", compact=True)
            yield Static("", id="problem", markup=False)

    def on_mount(self) -> None:
        """The prompt is what most want to type."""
        self.query_one("#prompt", Input).focus()

    @on(Input.Submitted)
    def _submitted(self) -> None:
        """Start if both fields make sense."""
        tp, prompt = self.query_one("#tp", Input).value, self.query_one("#prompt", Input).value
        problem = ""
        if not tp.isdigit() or int(tp) not in self._found.tps:
            problem = f"tp must be one of {', '.join(map(str, self._found.tps))}"
        elif not prompt:
            problem = "type a prompt"
        self.query_one("#problem", Static).update(problem)
        if not problem:
            self.dismiss(ModelChoice(int(tp), prompt))

    def action_close(self) -> None:
        """Run nothing."""
        self.dismiss(None)
