"""One way from a token id to its text, and one form in which it is shown."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from lockstep.sessions.meta import ModelMeta, SessionMeta
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.models.tokenizer import find_tokenizer
from lockstep.workbench.views.token_texts import TokenTexts, checkpoint_path, token_label

DEMO = find_tokenizer(MODEL_DIR)


@given(st.text(max_size=40))
def test_a_label_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = token_label(text)
    assert shown
    assert 1 <= cell_len(shown) <= 25
    for character in shown:
        assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.mark.parametrize(
    ("text", "label"),
    [("", "∅"), (" The", " The"), ("\n\n", "⏎⏎"), ("   ", "···"), ("a ", "a·"), ("<|im_end|>", "‹|im_end|›")],
)
def test_labels(text: str, label: str) -> None:
    assert token_label(text) == label


def test_the_recorded_text_goes_before_the_tokenizer_and_the_id_comes_last() -> None:
    assert DEMO is not None
    known = DEMO.token(300)
    assert known is not None
    texts = TokenTexts({301: "recorded"}, lambda: DEMO)
    assert texts.label(301) == "recorded"
    assert texts.text(300) == known
    assert texts.label(1 << 40) == f"‹{1 << 40}›"
    assert TokenTexts({}).label(7) == "‹7›"


def test_texts_are_joined_without_special_tokens() -> None:
    assert DEMO is not None
    ids = DEMO.encode("a word")
    assert TokenTexts({}, lambda: DEMO).joined(ids) == "a word"
    assert TokenTexts({1: "a", 2: " b", 3: "<end>"}, special=[3]).joined([1, 2, 9, 3]) == "a b<9>"
    assert TokenTexts({}).joined([1]) is None


@pytest.mark.parametrize("path", ["", "/nowhere", "x" * 5000, "a\0b"])
def test_a_checkpoint_that_is_not_there_is_none(path: str) -> None:
    assert checkpoint_path(SessionMeta(model=ModelMeta(path=path))) is None


def test_a_broken_tokenizer_costs_only_the_texts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert TokenTexts.of(SessionMeta(model=ModelMeta(path=str(tmp_path)))).label(5) == "‹5›"
