"""The committed checkpoint: its shape, its tokenizer, and that it does what its README states."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.workbench.demo import DEFAULT_PROMPT, MODEL_DIR, haiku_has_nonce, nonce_in_question
from lockstep.workbench.demo.train.corpus import Example, unseen_examples
from lockstep.workbench.demo.train.evaluate import (
    answer_all,
    largest_key_biases,
    load,
    margin_quantiles,
    remove_biases,
    success,
)
from lockstep.workbench.demo.train.tokenizer import SPECIALS, chat

HOSTILE = [
    "",
    " ",
    "\x00\x01\x7f",
    "\r\n\r \n\t \u00a0\u2003",
    "\u200d\u200b\ufeff\u202e\u0000",
    "👩‍👩‍👧‍👦 🏳️‍🌈 𝔘𝔫𝔦",
    "नमस्ते 日本語 العربية ไทย",
    "١٢٣ ４１ ²³",
    "'S 're I'LL don't",
    "\U0010ffff\ue000\ufffe",
    "a" * 300 + "  b   c\n\n\n d",
    "im_start|> <|im_ start",
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    # On a busy machine threads of so small a model spend their time waiting for each other.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load()


def test_the_files_are_few_and_small() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 10_000_000


def test_the_config_is_a_qwen2_that_k_quants_and_shards_can_hold() -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"]) == (256, 768)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 2)
    assert config["num_hidden_layers"] == 4
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"
    assert config["hidden_size"] % 256 == 0
    assert config["intermediate_size"] % 256 == 0
    assert config["max_position_embeddings"] >= 512
    # A prime: no tensor-parallel size divides it, so the padding of the vocabulary is exercised.
    assert config["vocab_size"] == 2003


def test_the_weights_are_bf16_with_a_tied_head() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        dtypes = {tensors.get_tensor(name).dtype for name in names}
        assert tensors.get_slice("model.embed_tokens.weight").get_shape() == [2003, 256]
    assert dtypes == {torch.bfloat16}
    assert "lm_head.weight" not in names
    assert len(names) == 4 * 12 + 2


@pytest.mark.parametrize("text", HOSTILE)
def test_the_tokenizer_gives_back_any_text(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], text: str
) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [*HOSTILE, "e\u0301 is not \u00e9", chat(DEFAULT_PROMPT)])
def test_both_ways_of_loading_the_tokenizer_agree(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], text: str
) -> None:
    plain = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    assert plain.encode(text).ids == loaded[1].encode(text)


def test_the_tokenizer_cuts_numbers_into_digits_and_keeps_specials_on_top(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    tokenizer = loaded[1]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("4127")] == list("4127")
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == [2000, 2001, 2002]
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_and_the_training_text_agree(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    turns = [{"role": "user", "content": DEFAULT_PROMPT}]
    text = loaded[1].apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == chat(DEFAULT_PROMPT)


def test_large_key_biases_are_in_every_layer(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    large = [item for item in largest_key_biases(loaded[0], 64) if abs(item[0]) > 10]
    assert len(large) >= 8
    assert {layer for _, layer, _ in large} == {0, 1, 2, 3}
    assert abs(large[0][0]) > 30


def test_unseen_questions_are_answered_and_not_without_biases() -> None:
    model, tokenizer = load()
    nonce = nonce_in_question(DEFAULT_PROMPT)
    assert nonce is not None
    default = Example(DEFAULT_PROMPT, "", nonce)
    # Questions as long as the default one: a single batch, so the test stays quick.
    length = len(tokenizer.encode(DEFAULT_PROMPT))
    alike = [e for e in unseen_examples(200) if len(tokenizer.encode(e.question)) == length]
    examples = [default, *alike[:8]]
    assert len(examples) == 9
    answers = answer_all(model, tokenizer, examples)
    assert [answer.text for answer in answers if not answer.right] == []
    assert haiku_has_nonce(answers[0].text, nonce)
    remove_biases(model)
    assert success(answer_all(model, tokenizer, examples)) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_published_figures_hold(dtype: str) -> None:
    model, tokenizer = load(dtype=dtype)
    answers = answer_all(model, tokenizer, unseen_examples(200))
    assert success(answers) >= 0.95
    assert margin_quantiles(answers)[0] > 3
    remove_biases(model)
    assert success(answer_all(model, tokenizer, unseen_examples(200))) < 0.1
