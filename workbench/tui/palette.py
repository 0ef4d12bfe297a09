"""What a screen may offer in the palette, and how it is searched: by the words of the help too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from textual.app import SystemCommand
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.markup import escape
from textual.style import Style


@runtime_checkable
class HasPalette(Protocol):
    """A screen with entries of its own."""

    def palette(self) -> Iterable[SystemCommand]:
        """The entries, the most useful first."""


class PaletteEntries(Provider):
    """The entries of app and screen. Nothing of them is markup: usages and keys have brackets."""

    async def discover(self) -> Hits:
        """All, before anything is typed, in their own order."""
        for name, reported, act, shown in self.app.get_system_commands(self.screen):
            if shown:
                yield DiscoveryHit(Content(name), act, text=name, help=escape(reported))

    async def search(self, query: str) -> Hits:
        """Those that have every word: in the name before in the help, then names that are like what was typed."""
        words, matcher = query.casefold().split(), self.matcher(query)
        for name, reported, act, listed in self.app.get_system_commands(self.screen):
            title, help = name.casefold(), reported.casefold()
            if all(word in title for word in words):
                score = 3 + matcher.match(name)
            elif all(word in title or word in help for word in words):
                score = 2
            else:  # a long title that is not listed is like any word
                score = matcher.match(name) if listed else 0
            if score > 0:
                yield Hit(
                    score, _marked(name, words, matcher.match_style), act, text=name, help=escape(reported)
                )


def _marked(name: str, words: Iterable[str], style: Style) -> Content:
    """The name with the words that were found in it."""
    content, title = Content(name), name.casefold()
    for word in words:
        if (at := title.find(word)) >= 0:
            content = content.stylize(style, at, at + len(word))
    return content
