"""The line above the keys: what an action had to say, else what the pane in front tells, else what the step did."""

from __future__ import annotations

from workbench.tui.widgets.status_line import Fact, StatusLine

Facts = tuple[Fact, ...]


class MessageLine(StatusLine):
    """The most urgent of its messages on the left; where two branches differ, or the step's figures, on the right."""

    DEFAULT_CSS = "MessageLine { height: 1; width: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._said: Facts = ()
        self._story: Facts = ()
        self._step: tuple[Facts, Facts] = ((), ())
        self._difference: Facts = ()

    def tell(self, text: str, wrong: bool = False) -> None:
        """Say something about the last action, until the next place or pane."""
        mark = (Fact("✗", "wrong"),) if wrong else ()
        self._said = (*mark, Fact(text, "text"))
        self._show()

    def forget(self) -> None:
        """What was said belongs to the place before; it stays on screen until the next one was read."""
        self._said = ()

    def forget_story(self) -> None:
        """Another pane came to the front; as with `forget`."""
        self._said = self._story = ()

    def tell_story(self, facts: Facts) -> None:
        """What the pane in front has to tell."""
        self._story = facts
        self._show()

    def show_step(self, step: tuple[Facts, Facts], difference: Facts) -> None:
        """What the step did, and where its branch left the one that it is compared with."""
        self._step, self._difference = step, difference
        self._show()

    def _show(self) -> None:
        left, right = self._step
        self.show(self._said or self._story or left, self._difference or right)
