"""Tokenizers out of GGUF files: ids as llama.cpp and the original tokenizer give them, damaged ones refused."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.errors import ConfigError, RequestError
from lockstep.workbench.demo import GGUF_DIR, MODEL_DIR
from lockstep.workbench.models.gguf_tokenizer import CUTS
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.models.requests import prompt_ids
from lockstep.workbench.models.tokenizer import TextStream, Tokenizer, find_tokenizer
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin, tokenizer_keys, write_keys

pytestmark = pytest.mark.sampled_file(2)

DATA = Path(__file__).parents[4] / "shared/data"
STORIES, QWEN = DATA / "stories260K/stories260K.gguf", DATA / "qwen2.5-0.5b-instruct"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not there")

TEXTS = [
    "Once upon a time, there was a cat.",
    "  two  spaces\n\nand\tlines \r\n   end  ",
    "naïve café, ünï, 日本語のテキスト, русский, العربية, 🙂👩‍👩‍👧, é (decomposed: e\u0301)",
    "I'll say it's 1234567 or 3.14159 = 22/7? (really!) $9.99 <= #42 ~^|",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<s>x</s> <unk><|endoftext|>",
    "THEY'RE McDonald's iPhone ABCdef",
    "a" * 100,
    " ",
    "",
]


def _found(path: Path) -> Tokenizer:
    found = find_tokenizer(path)
    assert found is not None
    return found


@needs_data
@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("I believe the meaning of life is", 18),
        ("Write a joke about AI from a very long prompt which will not be truncated", 46),
    ],
)
def test_the_prompts_of_llama_cpps_server_tests_have_as_many_ids_as_there(prompt: str, count: int) -> None:
    assert len(_found(STORIES).encode(prompt)) == count


@needs_data
def test_stories260k_goes_there_and_back() -> None:
    tokenizer = _found(STORIES)
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    for text in TEXTS:
        if "<" not in text:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            stream = TextStream(tokenizer)
            assert "".join([*map(stream.push, ids), stream.finish()]) == text
    assert (tokenizer.token(432), tokenizer.token(1), tokenizer.token(512)) == (",", "<s>", None)


def _by_score(text: str, pieces: dict[str, tuple[int, float]]) -> list[int]:
    """SentencePiece's BPE in its simplest form: of all neighbours that make a piece, merge the best, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        made = [(-pieces[a + b][1], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
        if not made:
            break
        _, i = min(made)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [pieces[part][0]] if part in pieces else [3 + byte for byte in part.encode()]
    return [1, *ids]


@needs_data
@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("abcdeilnorst uhTO,.é日\n"), max_size=40))
def test_pieces_merge_by_their_scores(text: str) -> None:
    tokenizer, pieces = _stories()
    assert tokenizer.encode(text) == _by_score(text, pieces)


@cache
def _stories() -> tuple[Tokenizer, dict[str, tuple[int, float]]]:
    """The tokenizer and, by gguf-py, the scores of the pieces that are neither special nor bytes."""
    reader = gguf.GGUFReader(STORIES)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    scores = reader.fields["tokenizer.ggml.scores"].contents()
    return _found(STORIES), {token: (i, scores[i]) for i, token in enumerate(tokens) if i >= 259}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("qwen") / "qwen.gguf", tokenizer_keys(QWEN))


@pytest.mark.slow
@needs_data
def test_the_real_qwen_tokenizer_gives_the_same_ids_from_gguf(qwen: Path) -> None:
    original, found = _found(QWEN), _found(qwen)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == original.encode(text), text
        for special in (True, False):
            assert found.decode(ids, special=special) == original.decode(ids, special=special)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 日本 \\o/"}]
    assert found.encode_chat(messages) == original.encode_chat(messages)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", sorted(path.name for path in GGUF_DIR.glob("*.gguf")))
def test_the_demo_in_gguf_has_the_demos_tokenizer(file: str) -> None:
    original, found = _found(MODEL_DIR), _found(GGUF_DIR / file)
    for text in TEXTS:
        assert found.encode(text) == original.encode(text), text
    messages = [{"role": "user", "content": "Write a haiku about rain with the word zorblat"}]
    assert found.encode_chat(messages) == original.encode_chat(messages)
    assert found.decode(found.encode_chat(messages)) == original.decode(original.encode_chat(messages))


def _llama_cpp_ids(file: Path, texts: list[str]) -> list[list[int]]:
    """Ids by llama.cpp itself."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]


@pytest.mark.llamacpp
@pytest.mark.parametrize("pre", CUTS)
def test_every_cut_is_llama_cpps(pre: str, tmp_path: Path) -> None:
    keys = tokenizer_keys(MODEL_DIR, pre) | {"tokenizer.ggml.bos_token_id": 0}
    del keys["tokenizer.ggml.add_bos_token"]  # so that it is the cut that decides whether there is one
    file = write_keys(tmp_path / "words.gguf", keys)
    # What llama.cpp leaves as it is and Qwen's own tokenizer composes would differ by design.
    texts = [text.replace("e\u0301", "é") for text in TEXTS]
    found = _found(file)
    assert [found.encode(text) for text in texts] == _llama_cpp_ids(file, texts)


@needs_data
@pytest.mark.llamacpp
def test_stories260k_has_the_ids_of_llama_cpp() -> None:
    assert [_found(STORIES).encode(text) for text in TEXTS] == _llama_cpp_ids(STORIES, TEXTS)


PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "<tool>", "[PAD]"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 4, 5],
}


def test_types_of_tokens_and_ends(tmp_path: Path) -> None:
    plain = _found(write_keys(tmp_path / "a.gguf", PIECES))
    assert plain.encode("ab<tool>a</s>") == [1, 3, 6, 7, 3, 4, 2]
    assert plain.decode([1, 3, 6, 7, 3, 4, 2]) == "ab<tool> a"
    assert plain.token(8) is None  # unused
    keys = {"add_bos_token": False, "add_eos_token": True, "add_space_prefix": False}
    file = write_keys(tmp_path / "b.gguf", PIECES | {f"tokenizer.ggml.{key}": on for key, on in keys.items()})
    assert _found(file).encode("a b") == [4, 3, 5, 2]


def test_a_file_without_tokenizer_has_none_or_the_one_beside_it(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "bare.gguf", {})
    assert find_tokenizer(file) is None
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    assert _found(file).encode("rain") == _found(MODEL_DIR).encode("rain")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert': not supported; supported are llama, gpt2"),
        (
            {"model": "gpt2", "pre": "viking"},
            r"tokenizer.ggml.pre is 'viking': not supported; supported are default",
        ),
    ],
)
def test_a_tokenizer_of_an_unknown_kind_stops_only_those_who_need_one(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys = PIECES | {"tokenizer.ggml.merges": ["a b"]}
    keys |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    checkpoint = tiny_variant(tmp_path, "qwen2-tied")
    file = gguf_twin(checkpoint, tmp_path / "odd.gguf", keys=keys)
    model = open_model(str(file))
    assert prompt_ids(model, None, ["5,6"], chat=False) == [[5, 6]]
    with pytest.raises(RequestError, match=message + ".*: give token ids with --ids"):
        prompt_ids(model, ["a"], None, chat=False)
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    assert _found(file).encode("rain") == _found(MODEL_DIR).encode("rain")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, r"tokenizer.ggml.model is 3: expected a string"),
        ({"tokens": [1] * 9}, r"tokenizer.ggml.tokens at byte \d+ is an array of INT32, expected STRING"),
        (
            {"tokens": [*PIECES["tokenizer.ggml.tokens"][:4], "a" * 300, *"bcde"]},
            r"token 4 has 300 characters",
        ),
        ({"tokens": "a"}, r"tokenizer.ggml.tokens is not an array of STRING"),
        ({"scores": [1] * 9}, r"tokenizer.ggml.scores at byte \d+ is an array of INT32, expected FLOAT32"),
        ({"scores": [1.0] * 8}, r"tokenizer.ggml.scores at byte \d+ has 8 elements for 9 tokens"),
        ({"scores": None}, r"tokenizer.ggml.scores is missing \(expected an array of FLOAT32\)"),
        (
            {"token_type": ["x"] * 9},
            r"tokenizer.ggml.token_type at byte \d+ is an array of STRING, expected INT32",
        ),
        ({"token_type": [1] * 10}, r"tokenizer.ggml.token_type at byte \d+ has 10 elements for 9 tokens"),
        ({"bos_token_id": 9}, r"tokenizer.ggml.bos_token_id is 9: the vocabulary has 9 tokens"),
        ({"model": "gpt2"}, r"tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "merges": [1.0]}, r"tokenizer.ggml.merges at byte \d+ is an array of FLOAT32"),
        ({"model": "gpt2", "merges": ["a zz"]}, r"its tokenizer cannot be built: .*zz.* out of vocabulary"),
        ({"model": "gpt2", "merges": ["ab"]}, r"its tokenizer cannot be built"),
    ],
)
def test_what_is_wrong_with_a_tokenizer_is_reported_by_key(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    keys = PIECES | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    file = write_keys(tmp_path / "bad.gguf", {key: value for key, value in keys.items() if value is not None})
    with pytest.raises(ConfigError, match=message) as caught:
        find_tokenizer(file)
    assert str(file) in str(caught.value)
