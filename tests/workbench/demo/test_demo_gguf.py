"""The demo model's GGUF files: made by llama.cpp, and as good as the checkpoint that they were made from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import EngineConfig
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.loading import Loader
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.workbench.demo import DEFAULT_PROMPT, GGUF_DIR
from lockstep.workbench.demo.checkpoints import DEMOS, demo_path
from lockstep.workbench.demo.quantise import quantise, write_f16
from lockstep.workbench.demo.train.corpus import unseen_examples
from lockstep.workbench.demo.train.evaluate import answer_with_engine, success
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.references.llamacpp.library import LlamaModel, dequantise
from lockstep.workbench.references.loading import load_golden

QUANTISED = {"demo-q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "demo-q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M}


@pytest.mark.slow
def test_every_name_opens_the_same_model_with_its_tokenizer_and_template():
    demos = [open_model(name) for name in DEMOS]
    assert [one.name for one in demos] == list(DEMOS)
    prompts = []
    for one in demos:
        assert one.tokenizer is not None
        assert one.offers_prompt
        prompts.append(one.tokenizer.encode_chat([{"role": "user", "content": DEFAULT_PROMPT}]))
    assert prompts == prompts[:1] * len(DEMOS)
    assert demo_path("demo-q5_k") is None


def test_the_shipped_files_are_small_and_of_the_types_that_they_state():
    assert sum(file.stat().st_size for file in GGUF_DIR.iterdir()) < 10e6
    types = {name: open_checkpoint(GGUF_DIR / f"{name}.gguf")[0].block_types for name in QUANTISED}
    assert types == {"demo-q8_0": ("F32", "Q8_0"), "demo-q4_k_m": ("F32", "Q4_K", "Q6_K")}  # no fallback


def test_f16_is_written_once_and_always_the_same(tmp_path):
    kept = demo_path("demo-f16")
    assert kept is not None
    write_f16(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == kept.read_bytes()
    before = kept.stat().st_mtime_ns
    assert demo_path("demo-f16") == kept
    assert kept.stat().st_mtime_ns == before
    assert [file.name for file in kept.parent.iterdir()] == ["demo-f16.gguf"]


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", QUANTISED)
def test_llama_cpp_makes_the_shipped_files_of_it(name, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    source = demo_path("demo-f16")
    assert source is not None
    quantise(source, tmp_path / "made.gguf", QUANTISED[name])
    assert (tmp_path / "made.gguf").read_bytes() == (GGUF_DIR / f"{name}.gguf").read_bytes()


def our_logits(path: Path, prompt: list[int]) -> np.ndarray:
    """After the last token of the prompt, [vocab]."""
    loader = Loader(path, EngineConfig(), Comm())
    runner = Runner(loader.model, EngineConfig(), Comm(), CORRECT, loader)
    logits = next(index for index, spec in enumerate(runner.specs) if spec.name == "logits")
    runner.watch(CapturePolicy(tensors={logits: "full"}))
    runner.add(0, prompt, Sampling())
    (captured,) = runner.step().captured
    return captured.tensor[0].numpy()


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", DEMOS[1:])
def test_final_logits_are_those_of_llama_cpp_within_the_noise_of_float32(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    opened = open_model(name)
    assert opened.tokenizer is not None
    prompt = opened.tokenizer.encode_chat([{"role": "user", "content": DEFAULT_PROMPT}])
    dequantise(
        opened.path, tmp_path / "exact.gguf", 1
    )  # by llama.cpp; it rounds activations to quantised blocks
    with LlamaModel(tmp_path / "exact.gguf", 1) as model:
        theirs = model.context(len(prompt), lambda *reported: False, lambda tensor: None).forward(prompt)
    with torch.no_grad():
        truth = load_golden(opened.path, "float64", "cpu")(torch.tensor([prompt])).logits[0, -1].numpy()
    noise = np.abs(theirs - truth).max()
    ours = our_logits(opened.path, prompt)
    assert 0 < noise < 1e-4
    assert np.abs(ours - truth).max() <= 3 * noise
    assert np.abs(ours - theirs).max() <= 3 * noise


def greedy(path: Path, prompt: list[int], steps: int) -> list[int]:
    """What the engine goes on with, end of text or not."""
    loader = Loader(path, EngineConfig(), Comm())
    runner = Runner(loader.model, EngineConfig(), Comm(), CORRECT, loader)
    runner.add(0, prompt, Sampling())
    found = [runner.step().sequences[0].emitted for _ in range(steps)]
    return [token for token in found if token is not None]


@pytest.mark.llamacpp
def test_f16_goes_on_as_in_llama_cpp_for_64_greedy_steps():
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    opened = open_model("demo-f16")
    assert opened.tokenizer is not None
    prompt = opened.tokenizer.encode_chat([{"role": "user", "content": DEFAULT_PROMPT}])
    theirs = llama_cpp.Llama(str(opened.path), n_ctx=512, n_threads=1, logits_all=True, verbose=False)
    ids, found = list(prompt), []
    theirs.eval(ids)
    for _ in range(64):
        found.append(int(np.argmax(theirs.scores[theirs.n_tokens - 1])))
        theirs.eval(found[-1:])
    theirs.close()
    assert greedy(opened.path, prompt, 64) == found


def test_q4_k_m_answers_questions():
    """A sample; the slow test asks all 200."""
    assert success(answer_with_engine(GGUF_DIR / "demo-q4_k_m.gguf", unseen_examples(6))) == 1


@pytest.mark.slow
def test_q4_k_m_answers_nearly_as_many_questions_as_the_checkpoint():
    assert success(answer_with_engine(GGUF_DIR / "demo-q4_k_m.gguf", unseen_examples(200))) >= 0.95
