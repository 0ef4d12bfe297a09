"""The page: complete in itself, inert whatever a session holds, and readable by everyone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.engine.faults.catalogue import FAULTS
from lockstep.sessions import Session, SessionWriter, VerdictRecord
from lockstep.workbench.export.palette import DARK, LIGHT
from lockstep.workbench.export.report import render
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.story import story_of
from tests.workbench.export import made


class Page(HTMLParser):
    """Every element with its attributes, the text between, and what stands in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.raw: list[tuple[str, dict[str, str], str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag in ("script", "style"):
            self.raw.append((tag, attributes, ""))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            tag, attributes, before = self.raw[-1]
            self.raw[-1] = tag, attributes, before + data
        else:
            self.text += data


def _page(path: Path, request: Request | None = None) -> tuple[str, Page]:
    with Session.open(path) as session:
        text = render(
            story_of(session, request or Request(attention=((0, None), (1, 2)), biases=(0,)), FAULTS)
        )
    return text, Page(text)


def _hostile(path: Path) -> Path:
    words = made.HOSTILE
    texts = {str(token): words[token % len(words)].replace("\ud800", "") for token in range(100)}
    safe = [word.replace("\ud800", "") for word in words]
    meta = {
        "model": {"name": safe[0], "path": "/" + safe[6], "checkpoint": safe[3]},
        "config": {"dtype": safe[1], "device": safe[2], "backend": safe[4]}, "token_texts": texts,
        "versions": dict(zip(safe, reversed(safe), strict=True)), "rules": {safe[0]: safe[1]},
        "source": safe[9], "capture": {"full": safe, "last": [safe[6]], safe[2]: [safe[6]]},
    }  # fmt: skip
    made.build(path, tokens=range(10, 20), meta=meta, other=range(40, 44))
    with SessionWriter.reopen(path) as writer:
        for word in safe:
            writer.event(
                0, 1, word, word, {"verdict": word, "notes": [word], "causes": [{"name": word, "text": word}]}
            )
        writer.branch(safe[0], parent=0, fork_step=1, rules={safe[2]: safe[0]})
        writer.verdicts(
            VerdictRecord(0, 2, f"layers.{i}.{word}", "fail", {"reason": word, "ranks": [word]})
            for i, word in enumerate(safe)
        )
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    return _page(_hostile(tmp_path_factory.mktemp("hostile") / "a.session"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    path = made.build(tmp_path_factory.mktemp("judged") / "a.session", other=(30, 31, 32))
    made.judge(path)
    return _page(path)


@pytest.mark.parametrize("which", ["hostile", "judged"])
def test_nothing_comes_from_elsewhere_and_nothing_runs_but_the_pages_own(
    which: str, request: pytest.FixtureRequest
) -> None:
    _, page = request.getfixturevalue(which)
    for tag, attributes in page.elements:
        assert tag not in (
            "iframe",
            "object",
            "embed",
            "link",
            "base",
            "form",
            "audio",
            "video",
            "foreignobject",
        )
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("style", "srcset", "action", "formaction", "background"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, value)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    running = [
        (tag, text) for tag, attributes, text in page.raw if attributes.get("type") != "application/json"
    ]
    assert [tag for tag, _ in running] == ["style", "script"]
    for tag, text in running:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace("// ", ""))


def test_hostile_words_are_text(hostile: tuple[str, Page]) -> None:
    text, page = hostile
    for word in ("<script>alert(1)</script>", "[bold]markup[/bold]", "{{ 7 * 7 }}{% raw %}", "]]><!--"):
        assert word in page.text
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "header", "div", "span", "code", "h1", "h2", "h3",
        "ul", "li", "bdi", "p", "nav", "a", "dl", "dt", "dd", "main", "section", "table", "caption", "thead",
        "tbody", "tr", "th", "td", "label", "input", "output", "script", "figure", "figcaption", "svg",
        "image", "rect", "path", "line", "circle", "text", "tspan", "g", "br", "footer",
    }  # fmt: skip
    bad = {c for c in text if c != "\n" and (unicodedata.category(c) in ("Cc", "Cf", "Cs"))}
    assert not bad


def test_the_scripts_data_is_json_that_cannot_leave_its_element(hostile: tuple[str, Page]) -> None:
    _, page = hostile
    blocks = [text for _, attributes, text in page.raw if attributes.get("type") == "application/json"]
    assert blocks
    for block in blocks:
        assert not set("<>&") & set(block)
        reported = json.loads(block, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        assert reported["lines"][0]["choices"]
        labels = {choice["label"] for line in reported["lines"] for choice in line["choices"].values()}
        assert "[bold]markup[/bold]" in labels


def test_the_story_is_reported(judged: tuple[str, Page]) -> None:
    _, page = judged
    words = " ".join(page.text.split())
    assert "Leaves the golden reference at layers.0.attn.probs, step 3 of branch main, rank 1" in words
    assert "900,000 times the noise floor" in words
    assert "additive mask: 0 times minus infinity (leaves 0.2 % of the error)" in words
    assert "load_bias=false instead of true: q/k/v biases never loaded · on load_bias=false" in words
    assert "load_bias=false: first difference at step 2" in words
    assert "judged by fixed tolerances" in words
    assert "1 operation is wrong by itself: layers.0.attn.probs from step 3" in words
    assert any("rel 3.2e-8 on golden inputs" in a.get("title", "") for _, a in page.elements)
    assert "toggle load_bias false" in words
    assert "Likeliest tokens that are not the reference's" in words
    assert "10 t20 t21" in words  # step, sequence, both tokens
    states = [
        a["class"].split()[0] for t, a in page.elements if t == "td" and "layers." in a.get("title", "")
    ]
    assert (states.count("fail"), states.count("inherited"), states.count("pass")) == (1, 4, 1)


def test_tables_have_headers_and_figures_have_labels(judged: tuple[str, Page]) -> None:
    _, page = judged
    assert all(a.get("scope") in ("col", "row") for t, a in page.elements if t == "th")
    figures = [a for t, a in page.elements if t == "svg"]
    assert len(figures) >= 8
    assert all(a["role"] == "img" and a["aria-label"] for a in figures)
    assert [t for t, _ in page.elements].count("h1") == 1
    anchors = {a["href"][1:] for t, a in page.elements if t == "a"}
    assert anchors <= {a["id"] for _, a in page.elements if "id" in a}


def test_what_is_not_there_is_reported(tmp_path: Path) -> None:
    text, page = _page(made.build(tmp_path / "a.session", tokens=()), Request(biases=(0,)))
    words = " ".join(page.text.split())
    assert "No sentinel fired." in words
    assert "Nothing of this session was judged." in words
    assert "The session holds no biases of this layer." in words
    assert "lockstep replay a.session" in words
    assert "None" not in text


@pytest.mark.parametrize("palette", [LIGHT, DARK])
@pytest.mark.parametrize("role", ["text", "quiet", "wrong", "accent", "rank-0", "rank-1", "rank-2", "rank-3"])
def test_colours_can_be_read(palette: dict[str, str], role: str) -> None:
    """WCAG 2 contrast: 4.5 on the ground for whatever is written."""
    light, dark = sorted((_luminance(palette[role]), _luminance(palette["ground"])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def _luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
