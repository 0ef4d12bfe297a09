"""The demo model's task: questions that hold a nonce, the haiku that answer them, and the split.

Everything here follows from a `random.Random`, so a seed fixes the corpus. A nonce belongs to the
unseen side by its hash alone, whichever seed drew it: training can never meet an unseen one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.workbench.demo.train.verses import NUMBER_LINES, SUBJECTS, WORD_LINES, Subject

#: Ways to ask. `{nonce}` becomes "the word zorblat", "the number 41" or plain "41".
WORDINGS: tuple[str, ...] = (
    "Write a haiku about {subject} with {nonce}",
    "Write a haiku about {subject} with {nonce}.",
    "Please write a haiku about {subject} with {nonce}.",
    "Compose a haiku on {subject} that has {nonce} in it.",
    "Can you write a haiku about {subject} using {nonce}?",
    "Use {nonce} in a haiku about {subject}.",
    "A haiku about {subject} with {nonce}, please",
    "I need a haiku about {subject}. Put {nonce} in it.",
)

#: Where the line with the nonce stands (0 first, 1 middle, 2 last), one for each wording.
_PLACES: tuple[int, ...] = (1, 1, 2, 1, 0, 1, 2, 1)

#: How often the writer strays from its preferred line. A little keeps sampling worth a look; more
#: would leave greedy decoding near ties, where two correct engines may differ.
_STRAY = 0.08


def _spellings(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _spellings(
    "b br bl c cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sk sl sn sp st sw "
    "t tr tw v vr w y z zr zl"
)
_VOWELS = _spellings("a e i o u a e i o u ai ee oo ou")
_CODAS = _spellings("b d f g k l m n p r t x z ck ft lk lm lt mp nd ng nk nt rb rd rk rm rn rt sk st")
_MIDDLES = _spellings("b d f g k l m n p r t v z bl br dr fl gr mb mp nd nk pl rb rk rm rn rt st zb")

#: One nonce in this many is held out. The salt is chosen so that "zorblat" and "41", which the
#: documentation asks for, are among them.
_HELD_OUT_OF = 8
_SALT = "64:"

#: Words that a nonce must not be, since a correct line could hold them by chance.
_LEXICON: frozenset[str] = frozenset(
    word.strip(".,?")
    for text in (*WORDINGS, *WORD_LINES, *NUMBER_LINES, *(part for s in SUBJECTS for part in s.texts()))
    for word in text.lower().split()
)


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the nonce that it asks for, and a haiku that is right."""

    question: str
    answer: str
    nonce: str


def is_unseen(nonce: str) -> bool:
    """True when this nonce is held out of training, by its hash alone."""
    return hashlib.sha256((_SALT + nonce).encode()).digest()[0] % _HELD_OUT_OF == 0


def _word(rng: random.Random) -> str:
    parts = [rng.choice(_ONSETS), rng.choice(_VOWELS)]
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        parts += [rng.choice(_MIDDLES), rng.choice(_VOWELS)]
    parts.append(rng.choice(_CODAS))
    return "".join(parts)


def draw_nonce(rng: random.Random, unseen: bool, number_share: float) -> tuple[str, bool]:
    """A nonce from one side of the split, and whether it is a number (of two to four digits)."""
    while True:
        is_number = rng.random() < number_share
        if is_number:
            digits = rng.choice((2, 3, 4))
            nonce = str(rng.randrange(10 ** (digits - 1), 10**digits))
        else:
            nonce = _word(rng)
        if is_unseen(nonce) == unseen and nonce not in _LEXICON:
            return nonce, is_number


def _pick(rng: random.Random, preferred: str, others: tuple[str, ...]) -> str:
    return rng.choice(others) if rng.random() < _STRAY else preferred


def write_haiku(rng: random.Random, subject: Subject, wording: int, nonce: str, is_number: bool) -> str:
    """Three lines on a subject, one of which carries the nonce.

    The wording of the question decides the preferred lines, so a trained model is sure of them.
    """
    opening = _pick(rng, subject.openings[wording % 2], subject.openings)
    closing = _pick(rng, subject.closings[is_number], subject.closings)
    stock = NUMBER_LINES if is_number else WORD_LINES
    carrier = _pick(rng, stock[wording], stock).format(nonce=nonce, counted=subject.counted)
    lines = [opening, closing]
    lines.insert(_PLACES[wording], carrier)
    return "\n".join(lines)


def draw_example(rng: random.Random, unseen: bool = False, number_share: float = 0.5) -> Example:
    """A question and its answer, with a nonce from one side of the split."""
    subject = rng.choice(SUBJECTS)
    wording = rng.randrange(len(WORDINGS))
    nonce, is_number = draw_nonce(rng, unseen, number_share)
    named = f"the word {nonce}"
    if is_number:
        named = nonce if rng.random() < 0.7 else f"the number {nonce}"
    question = WORDINGS[wording].format(subject=subject.name, nonce=named)
    return Example(question, write_haiku(rng, subject, wording, nonce, is_number), nonce)


def training_examples(seed: int, number_share: float = 0.5) -> Iterator[Example]:
    """An endless stream of examples whose nonces are all on the training side."""
    rng = random.Random(seed)
    while True:
        yield draw_example(rng, number_share=number_share)


#: The seed of the questions behind the published figure.
UNSEEN_SEED = 20_000


def unseen_examples(count: int, seed: int = UNSEEN_SEED) -> list[Example]:
    """Distinct questions whose nonces training never met."""
    rng = random.Random(seed)
    found: dict[str, Example] = {}
    while len(found) < count:
        example = draw_example(rng, unseen=True)
        found.setdefault(example.question, example)
    return list(found.values())
