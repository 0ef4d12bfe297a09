"""Nothing that a terminal acts on survives `clean`; what people write does."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.sessions import clean

NASTY = st.sampled_from("\x1b\x9b\x9d\x07\x9c\x90[]()?;0123456789mHJKhlcP\\\r\n\t\x00\x7f\u202e\u2066ab界é")


@given(st.text(st.one_of(NASTY, st.characters())), st.none() | st.integers(0, 30), st.booleans())
def test_no_control_survives(s: str, limit: int | None, newlines: bool) -> None:
    shown = clean(s, limit=limit, newlines=newlines)
    allowed = "\n\t" if newlines else ""
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs") and c not in allowed]
    assert not set(shown) & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u2028\u2029"
    )
    assert limit is None or len(shown) <= limit
    assert clean(shown, newlines=newlines) == shown


@given(st.text(st.characters(categories=["L", "M", "N", "P", "S", "Zs"])))
def test_ordinary_text_is_left_alone(s: str) -> None:
    assert clean(s) == s


@pytest.mark.parametrize(
    ("s", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛red␛"),
        ("\x1b]0;title\x07x", "␛x"),
        ("\x1b]8;;http://a\x1b\\link", "␛link"),
        ("\x1b]52;c;never ended", "␛52;c;never ended"),
        ("\x9b2Jx\x9d0;t\x9cy", "␛x␛y"),
        ("\x1bPq#0\x1b\\x", "␛x"),
        ("\x1b", "␛"),
        ("\x1bc\x1b(B", "␛␛"),
        ("a\nb\tc\r", "a⏎b⇥c␍"),
        ("\x00\x7f\x85", "␀␡�"),
        ("user\u202egnp.exe", "user�gnp.exe"),
        ("👩‍👩‍👧 e\u0301 שלום", "👩‍👩‍👧 e\u0301 שלום"),
    ],
)
def test_examples(s: str, shown: str) -> None:
    assert clean(s) == shown


def test_newlines_and_limits() -> None:
    assert clean("a\nb", newlines=True) == "a\nb"
    assert clean("abcdef", limit=4) == "abc…"
    assert clean("abcd", limit=4) == "abcd"
    assert clean("x" * 10**7, limit=5) == "xxxx…"
    assert clean("abc", limit=0) == ""
