"""The torch-free tokenizer against transformers' own, on the real Qwen2.5 files and on small made ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from lockstep.engine.errors import CheckpointError, ConfigError, RequestError
from lockstep.workbench.models.tokenizer import TextStream, Tokenizer, find_tokenizer, need_tokenizer

pytestmark = pytest.mark.sampled_file(2)

QWEN = Path(__file__).resolve().parents[4] / "shared" / "data" / "qwen2.5-0.5b-instruct"

TEXTS = [
    "Hello, world! It's 42 o'clock.",
    "  leading and trailing  \n\n\tand tabs",
    "naïve café, 日本語, 🤷🏽‍♀️ and e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x**2  # α",
]


def byte_tokenizer() -> Backend:
    """One token a byte, so that characters are split over tokens; 256 is a special <s> put first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return backend


def write_tokenizer(directory: Path, **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class HereBackend:
    """A tokenizer of our own, asked in this process."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=not special))

    def piece(self, token: int) -> str | None:
        return None if self.backend.id_to_token(token) is None else self.decode([token], special=True)


BYTES = Tokenizer(HereBackend(byte_tokenizer()), {}, None, Path("bytes"))


@given(st.text(max_size=40), st.text(max_size=10))
def test_a_stream_adds_up_to_the_text(text: str, more: str) -> None:
    ids = BYTES.encode(text + more)
    stream = TextStream(BYTES)
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.finish() == BYTES.decode(ids) == text + more


@given(st.text(min_size=1, max_size=20))
def test_no_part_ends_inside_a_character(text: str) -> None:
    stream = TextStream(BYTES)
    parts = [stream.push(token) for token in BYTES.encode(text)]
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_of_any_bytes_loses_none(ids: list[int]) -> None:
    stream = TextStream(BYTES)
    parts = [stream.push(token) for token in ids]
    shown = "".join(parts) + stream.finish()
    assert shown.replace("\ufffd", "") == BYTES.decode(ids).replace("\ufffd", "")
    assert bool(shown) == bool(ids)


def test_broken_bytes_do_not_hold_the_text_back() -> None:
    stream = TextStream(BYTES)
    lead = BYTES.encode("\u00e9")[1]  # 0xC3, the first byte of two
    assert any(stream.push(lead) for _ in range(12))


def test_special_tokens_are_added_once_and_left_out_of_text() -> None:
    assert BYTES.encode("a")[0] == 256
    assert BYTES.decode(BYTES.encode("a")) == "a"
    assert BYTES.token(256) == "<s>"
    assert BYTES.token(999) is None


@pytest.mark.skipif(not QWEN.is_dir(), reason="shared data is not here")
class TestQwen:
    """Real vocabulary, merges and chat template."""

    @pytest.mark.slow
    def test_agrees_with_transformers(self) -> None:
        from transformers import AutoTokenizer  # heavy, and only here

        theirs = AutoTokenizer.from_pretrained(QWEN)
        ours = need_tokenizer(find_tokenizer(QWEN), QWEN)
        for text in TEXTS:
            ids = theirs(text).input_ids
            assert ours.encode(text) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            messages = [{"role": "user", "content": text}]
            wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert ours.encode_chat(messages) == wanted
        system = [{"role": "system", "content": "Be brief."}, *messages]
        assert ours.render(system) == theirs.apply_chat_template(
            system, add_generation_prompt=True, tokenize=False
        )


def test_a_template_that_writes_bos_does_not_get_another(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    directory = write_tokenizer(tmp_path, bos_token={"content": "<s>"}, chat_template=template)
    tokenizer = need_tokenizer(find_tokenizer(directory), directory)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(256) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{% for",
        "{{ ().__class__.__bases__[0] }}",
        "{{ no_such_function() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_error(tmp_path: Path, template: str) -> None:
    directory = write_tokenizer(tmp_path, chat_template=template)
    tokenizer = need_tokenizer(find_tokenizer(directory), directory)
    with pytest.raises(CheckpointError, match="chat template failed: "):
        tokenizer.render([{"role": "user", "content": "hi"}])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 1 % 0 }}", "ZeroDivisionError: "),
        ("{{ messages[0].content.nothing.at_all }}", "has no attribute"),
        ("{{ [1, 2][7].x }}", "has no element 7"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: "),
        ("{{ '%d' % 'x' }}", "TypeError: "),
        ("{{ 'x'.index('y') }}", "ValueError: "),
        ("{{ ''.join([1]) }}", "TypeError: "),
        ("{{ '{}'.format() }}", "IndexError: "),
        ("{{ 10.0 ** 999 }}", "OverflowError: "),
        ("{{ 2 | nothing }}", "No filter named 'nothing'"),
    ],
)
def test_a_template_that_fails_states_at_what(tmp_path: Path, template: str, why: str) -> None:
    tokenizer = Tokenizer(HereBackend(byte_tokenizer()), {}, template, tmp_path)
    with pytest.raises(CheckpointError) as raised:
        tokenizer.render([{"role": "user", "content": "hi"}])
    assert why in str(raised.value)
    assert "it takes more" not in str(raised.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10000000000 }}",
        "{% set n = namespace(a='xxxx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_takes_all_memory_or_time_is_ended(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lockstep.workbench.models.chat_template.SECONDS", 0.25
    )  # of the parent: the child has 5 s
    tokenizer = need_tokenizer(find_tokenizer(write_tokenizer(tmp_path, chat_template=template)), tmp_path)
    with pytest.raises(CheckpointError, match="chat template failed: "):
        tokenizer.render([{"role": "user", "content": "hi"}])


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(RequestError, match="the chat template refuses this: no system role"):
        need_tokenizer(find_tokenizer(directory), directory).render([])


def test_templates_by_name_and_by_file(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    directory = write_tokenizer(tmp_path, chat_template=named)
    assert need_tokenizer(find_tokenizer(directory), directory).render([]) == "D"
    (directory / "chat_template.jinja").write_text("F")
    assert need_tokenizer(find_tokenizer(directory), directory).render([]) == "F"
    (directory / "chat_template.jinja").write_text(r"{{ '\ud800' }}")
    assert need_tokenizer(find_tokenizer(directory), directory).render([]) == "?"


def test_what_is_missing_is_reported(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    with pytest.raises(RequestError, match=r"--ids"):
        need_tokenizer(None, tmp_path)
    directory = write_tokenizer(tmp_path / "t")
    with pytest.raises(RequestError, match=r"without --chat"):
        need_tokenizer(find_tokenizer(directory), directory).render([])
    (directory / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a git-LFS pointer"):
        find_tokenizer(directory)
    for content in (b"{", b"\xff\xfe", b'{"model": 3}'):
        (directory / "tokenizer.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            find_tokenizer(directory)
