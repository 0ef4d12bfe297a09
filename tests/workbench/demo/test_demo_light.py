"""The torch-free side of the demo: the checker, the corpus, and what importing the package costs."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from lockstep.workbench.demo import DEFAULT_PROMPT, haiku_has_nonce, nonce_in_question
from lockstep.workbench.demo.train.corpus import is_unseen, training_examples, unseen_examples

GOOD = "soft rain on tin roofs\nI count 41 drops alone\npuddles hold the sky"


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, lockstep.workbench.demo; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_right_haiku_passes_with_blank_space_around_it() -> None:
    assert haiku_has_nonce(GOOD, "41")
    assert haiku_has_nonce(f"\n{GOOD}\n", "41")


@pytest.mark.parametrize(
    ("text", "nonce"),
    [
        (GOOD, "4"),
        (GOOD, "1"),
        (GOOD, "411"),
        (GOOD.replace("41", "412"), "41"),
        (GOOD.replace("41", "x41"), "41"),
        (GOOD.replace("\n", " "), "41"),
        (GOOD + "\none more line", "41"),
        (GOOD.replace("\n", "\n\n"), "41"),
        (GOOD.replace("puddles hold the sky", "sky"), "41"),
        (GOOD + " sky" * 20, "41"),
        ("", "41"),
        (GOOD.replace("41", "a.b"), "a?b"),
    ],
)
def test_a_wrong_haiku_fails(text: str, nonce: str) -> None:
    assert not haiku_has_nonce(text, nonce)


def test_the_nonce_of_every_question_is_found() -> None:
    for example in itertools.islice(training_examples(3), 500):
        assert nonce_in_question(example.question) == example.nonce
    assert nonce_in_question("Write a haiku about rain") is None


def test_the_default_question_holds_an_unseen_nonce() -> None:
    nonce = nonce_in_question(DEFAULT_PROMPT)
    assert nonce is not None
    assert is_unseen(nonce)


def test_the_corpus_follows_from_its_seed_and_passes_its_own_checker() -> None:
    first = list(itertools.islice(training_examples(5), 300))
    assert first == list(itertools.islice(training_examples(5), 300))
    assert first != list(itertools.islice(training_examples(6), 300))
    assert all(haiku_has_nonce(example.answer, example.nonce) for example in first)


def test_training_and_unseen_nonces_never_meet() -> None:
    trained = {example.nonce for example in itertools.islice(training_examples(42), 20_000)}
    unseen = unseen_examples(200)
    assert len({example.question for example in unseen}) == 200
    assert not trained & {example.nonce for example in unseen}
    # Both kinds of nonce are asked for, in fair shares.
    assert 60 < sum(example.nonce.isdigit() for example in unseen) < 140
