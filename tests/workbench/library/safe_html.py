"""What a result shows in a notebook, as a browser would parse it."""

from __future__ import annotations

from html.parser import HTMLParser

#: The elements and attributes that results are made of: none runs a script, loads a file, or styles the page.
TAGS = {"div", "p", "table", "caption", "thead", "tbody", "tr", "th", "td", "img"}
ATTRIBUTES = {"style", "colspan", "alt", "src"}


class Shown(HTMLParser):
    """The texts of a page, all of whose elements were made by us."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert name in ATTRIBUTES, name
            assert name != "src" or str(value).startswith("data:image/svg+xml;base64,")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All that is to be read."""
        return "\n".join(self.texts)
