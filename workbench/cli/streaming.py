"""Tokens shown as they come: running text for one sequence, for several a panel each or a line when done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from lockstep.sessions.text import clean
from lockstep.workbench.models.tokenizer import TextStream, Tokenizer


class Display(Protocol):
    """What is reported of each token; a context manager, so that a terminal is always left in order."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *_: object) -> None: ...

    def token(self, seq: int, token: int | None, finished: str | None) -> None:
        """Sequence `seq` has emitted `token` (None: nothing, and it has ended); `finished` states why it ended."""
        ...


class Silent:
    """Shows nothing: the result is printed as JSON."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def token(self, seq: int, token: int | None, finished: str | None) -> None:
        """Nothing to show."""


class Running:
    """One sequence: its text, piece by piece."""

    def __init__(self, tokenizer: Tokenizer | None, write: Callable[[str], object]) -> None:
        self._text, self._write = _Text(tokenizer), write

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("\n")

    def token(self, seq: int, token: int | None, finished: str | None) -> None:
        """Write what is final of the text."""
        self._write(self._text.push(token, finished is not None))


class Lines:
    """Several sequences where there is no terminal: each as a block when it has ended."""

    def __init__(self, tokenizer: Tokenizer | None, count: int, write: Callable[[str], object]) -> None:
        self._texts = [_Text(tokenizer) for _ in range(count)]
        self._parts: list[str] = [""] * count
        self._write = write

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def token(self, seq: int, token: int | None, finished: str | None) -> None:
        """Keep the text, and write it when it is whole."""
        self._parts[seq] += self._texts[seq].push(token, finished is not None)
        if finished:
            self._write(f"--- prompt {seq + 1} ({finished})\n{self._parts[seq]}\n")


class Panels:
    """Several sequences on a terminal: all grow side by side."""

    def __init__(self, tokenizer: Tokenizer | None, count: int) -> None:
        self._texts = [_Text(tokenizer) for _ in range(count)]
        self._parts: list[str] = [""] * count
        self._ended: dict[int, str] = {}
        self._live = Live(self._render(), console=Console(), vertical_overflow="visible", auto_refresh=False)

    def __enter__(self) -> Panels:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def token(self, seq: int, token: int | None, finished: str | None) -> None:
        """Paint the text grown by this token."""
        self._parts[seq] += self._texts[seq].push(token, finished is not None)
        if finished:
            self._ended[seq] = finished
        self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = []
        for seq, text in enumerate(self._parts):
            ended = f" ({self._ended[seq]})" if seq in self._ended else ""
            rows += [Rule(Text(f"prompt {seq + 1}{ended}"), align="left"), Text(text)]
        return Group(*rows)


def display(tokenizer: Tokenizer | None, count: int, *, json: bool) -> Display:
    """The display that suits `count` sequences and what stdout is."""
    if json:
        return Silent()
    if count == 1:
        return Running(tokenizer, _write)
    return Panels(tokenizer, count) if sys.stdout.isatty() else Lines(tokenizer, count, _write)


class _Text:
    """One sequence's tokens as text that is safe to print; as ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer)

    def push(self, token: int | None, last: bool) -> str:
        if self._stream is None:
            return "" if token is None else f"{token}" if last else f"{token} "
        text = "" if token is None else self._stream.push(token)
        return clean(text + self._stream.finish() if last else text, newlines=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
