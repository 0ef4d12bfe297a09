"""The golden recorder against transformers itself, run without any hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from lockstep.engine.taps.names import tap_specs
from lockstep.sessions import Session
from lockstep.workbench.references import attention
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.loading import CACHE
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence, ReferenceFailure
from lockstep.workbench.references.steps import TOP_K
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import VARIANTS, tiny_checkpoint, tiny_variant

pytestmark = pytest.mark.sampled_file(2)

PROMPT = tuple(range(3, 17))
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def recorded(path: Path, model_dir: Path, *sequences: GoldenSequence, **options: Any) -> Session:
    request = GoldenRequest(
        str(model_dir), sequences or (GoldenSequence(PROMPT),), **({"steps": STEPS} | options)
    )
    record(request, path)
    return Session.open(path)


def plain(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers as it comes."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()


def tensor(session: Session, tap: str, step: int = 0, seq: int = 0) -> np.ndarray:
    array = session.rebuilt(tap, step=step, seq=seq).array
    assert array is not None, tap
    return array


@pytest.fixture(scope="module", params=VARIANTS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Session, str]:
    root = tmp_path_factory.mktemp("family")
    model_dir = tiny_variant(root, request.param)
    return model_dir, recorded(root / "golden.session", model_dir), request.param


@pytest.mark.sampled(2)
def test_numbers_are_those_of_unhooked_transformers(family: tuple[Path, Session, str]) -> None:
    """Logits, hidden states and attentions, bit for bit, in the prefill and in decode steps."""
    model_dir, session, _ = family
    model, cache, ids = plain(model_dir), DynamicCache(), PROMPT
    for step in range(STEPS + 1):
        with torch.inference_mode():
            out = model(
                torch.tensor([ids]),
                use_cache=True,
                output_hidden_states=True,
                output_attentions=True,
                **{CACHE: cache},
                logits_to_keep=1,
            )
        np.testing.assert_array_equal(tensor(session, "logits", step), out.logits[0].numpy())
        hidden = [tensor(session, "embed", step)]
        layers = range(len(out.attentions))
        hidden += [tensor(session, f"layers.{i}.mlp_residual", step) for i in layers[:-1]]
        hidden += [tensor(session, "final_norm", step)]  # the last of transformers' is normed
        for ours, theirs in zip(hidden, out.hidden_states, strict=True):
            np.testing.assert_array_equal(ours, theirs[0].numpy())
        for i in layers:
            np.testing.assert_array_equal(
                tensor(session, f"layers.{i}.attn.probs", step), out.attentions[i][0].numpy()
            )
        (sequence,) = session.step(step).sequences
        assert sequence.ids == ids
        assert sequence.emitted == int(out.logits[0, -1].argmax())
        ids = (sequence.emitted,)


def test_taps_and_shapes_are_the_designs(family: tuple[Path, Session, str]) -> None:
    _, session, _ = family
    model = session.meta.model
    layers, heads, kv = model.num_layers, model.num_heads, model.num_kv_heads
    assert layers is not None
    assert heads is not None
    dim = model.head_dim or model.hidden_size // heads
    hidden, inner, vocab = model.hidden_size, model.intermediate_size, model.vocab_size
    specs = tap_specs(layers, {"qk_norm"} if session.has_tap("layers.0.attn.q_norm") else ())
    assert [(tap.name, tap.layout) for tap in session.taps] == [(s.name, str(s.layout)) for s in specs]
    for step in session.steps():
        new, keys = (1 if step else len(PROMPT)), len(PROMPT) + step
        shapes = {
            "q_proj": (new, heads * dim), "k_proj": (new, kv * dim), "v_proj": (new, kv * dim),
            "q_norm": (new, heads, dim), "k_norm": (new, kv, dim),
            "q_rope": (new, heads, dim), "k_rope": (new, kv, dim),
            "k_cache": (keys, kv, dim), "v_cache": (keys, kv, dim),
            "scores": (heads, new, keys), "probs": (heads, new, keys),
            "context": (new, heads * dim), "gate": (new, inner), "up": (new, inner), "act": (new, inner),
            "logits": (1, vocab),
        }  # fmt: skip
        for tap in session.taps:
            found = session.rebuilt(tap.name, step=step).array
            if tap.name in session.meta.absent:
                assert tap.name.endswith(".partial")
                assert found is None
            else:
                assert found is not None, tap.name
                assert found.shape == shapes.get(tap.name.rpartition(".")[2], (new, hidden)), tap.name
        (sequence,) = session.step(step).sequences
        assert tuple(sequence.positions) == tuple(range(keys - new, keys))
        assert sequence.kv_lens == ((keys,) * layers,)


def test_neighbouring_taps_fit_together(family: tuple[Path, Session, str]) -> None:
    """What one operation hands to the next, by its definition: the hooks are where they claim to be."""
    _, session, _ = family
    for step in session.steps():
        for i in range(session.meta.model.num_layers):
            t = {tap.name.removeprefix(f"layers.{i}."): tensor(session, tap.name, step) for tap in session.taps
                 if tap.name.startswith(f"layers.{i}.") and tap.name not in session.meta.absent}  # fmt: skip
            before = tensor(session, f"layers.{i - 1}.mlp_residual" if i else "embed", step)
            np.testing.assert_allclose(t["attn_residual"], before + t["attn.o_proj"], rtol=1e-6)
            np.testing.assert_allclose(t["mlp_residual"], t["attn_residual"] + t["mlp.down"], rtol=1e-6)
            silu = t["mlp.gate"] / (1 + np.exp(-t["mlp.gate"]))
            np.testing.assert_allclose(t["mlp.act"], silu * t["mlp.up"], rtol=1e-4, atol=1e-6)
            new = len(t["attn.k_rope"])
            np.testing.assert_array_equal(t["attn.k_cache"][-new:], t["attn.k_rope"])
            np.testing.assert_array_equal(t["attn.v_cache"][-new:].reshape(new, -1), t["attn.v_proj"])
            group = t["attn.q_rope"].shape[1] // t["attn.k_cache"].shape[1]
            keys, values = (t[f"attn.{x}_cache"].repeat(group, axis=1) for x in "kv")
            products = np.einsum("thd,khd->htk", t["attn.q_rope"], keys) * t["attn.q_rope"].shape[2] ** -0.5
            seen = np.isfinite(t["attn.scores"])
            np.testing.assert_allclose(t["attn.scores"][seen], products[seen], rtol=1e-4, atol=1e-5)
            context = np.einsum("htk,khd->thd", t["attn.probs"], values).reshape(new, -1)
            np.testing.assert_allclose(t["attn.context"], context, rtol=1e-4, atol=1e-5)


def test_scores_are_minus_infinity_exactly_where_the_mask_is(family: tuple[Path, Session, str]) -> None:
    _, session, variant = family
    windows = {"mistral-window": (8, 8, 8), "qwen2-window": (None, 8, 8)}.get(variant, (None,) * 3)
    for step in session.steps():
        new, keys = (1 if step else len(PROMPT)), len(PROMPT) + step
        distance = np.arange(keys - new, keys)[:, None] - np.arange(keys)[None, :]
        for i, window in enumerate(windows):
            seen = (distance >= 0) & (distance < (window or keys))
            scores = tensor(session, f"layers.{i}.attn.scores", step)
            assert (np.isneginf(scores) == ~seen).all()
            assert np.isfinite(scores[:, seen]).all()
            assert (tensor(session, f"layers.{i}.attn.probs", step)[:, ~seen] == 0).all()


@pytest.mark.sampled(4)
def test_decode_equals_one_full_pass(family: tuple[Path, Session, str], tmp_path: Path) -> None:
    """In float64, what the cached decode steps computed is what a single pass over all tokens computes."""
    model_dir, _, _ = family
    session = recorded(tmp_path / "steps.session", model_dir, dtype="float64")
    emitted = [session.step(step).sequences[0].emitted for step in range(STEPS)]
    whole = recorded(
        tmp_path / "whole.session", model_dir, GoldenSequence((*PROMPT, *emitted)), steps=0, dtype="float64"
    )
    for tap in ("layers.0.attn.q_rope", "layers.1.attn.context", "layers.2.mlp_residual", "final_norm"):
        rows = np.concatenate([tensor(session, tap, step) for step in session.steps()])
        np.testing.assert_allclose(rows, tensor(whole, tap), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(
        tensor(session, "logits", STEPS), tensor(whole, "logits"), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_bit_exact_too(dtype: str, tmp_path: Path) -> None:
    model_dir = tiny_variant(tmp_path, "qwen3-bias", dtype=getattr(torch, dtype))
    session = recorded(tmp_path / "golden.session", model_dir, steps=0, dtype=dtype)
    with torch.inference_mode():
        out = plain(model_dir, getattr(torch, dtype))(torch.tensor([PROMPT]), logits_to_keep=1)
    np.testing.assert_array_equal(tensor(session, "logits"), out.logits[0].float().numpy())
    assert {key.dtype for key in session.captured(0)} == {dtype}


def test_float64_is_float64_throughout(tmp_path: Path) -> None:
    """Norms, rotary angles and softmax, which transformers computes in float32 whatever the dtype."""
    model_dir = tiny_variant(tmp_path, "llama")
    session = recorded(tmp_path / "golden.session", model_dir, dtype="float64")
    assert {key.dtype for key in session.captured(0)} == {"float64"}
    weights = {name: w.double().numpy() for name, w in load_file(model_dir / "model.safetensors").items()}
    config = session.meta.model
    x = tensor(session, "layers.1.attn_residual")
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_eps)
    exact = norm * weights["model.layers.1.post_attention_layernorm.weight"]
    np.testing.assert_allclose(tensor(session, "layers.1.mlp_norm"), exact, rtol=1e-13)
    np.testing.assert_allclose(tensor(session, "layers.1.attn.probs").sum(-1), 1.0, rtol=1e-14)
    q = tensor(session, "layers.0.attn.q_proj").reshape(len(PROMPT), config.num_heads, -1)
    half = q.shape[-1] // 2
    angles = np.arange(len(PROMPT))[:, None] * 10000.0 ** -(np.arange(half) / half)
    turned = (q[..., :half] + 1j * q[..., half:]) * np.exp(1j * angles)[:, None]
    exact = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(tensor(session, "layers.0.attn.q_rope"), exact, rtol=1e-12, atol=1e-13)


def test_ragged_sequences_do_not_touch_each_other(tmp_path: Path) -> None:
    model_dir = tiny_variant(tmp_path, "mistral-window")
    sequences = [GoldenSequence(PROMPT), GoldenSequence((5,)), GoldenSequence((9, 8, 7, 6))]
    together = recorded(tmp_path / "all.session", model_dir, *sequences)
    for seq, sequence in enumerate(sequences):
        alone = recorded(tmp_path / f"{seq}.session", model_dir, sequence)
        for step in alone.steps():
            for tap in alone.taps:
                if tap.name not in alone.meta.absent:
                    np.testing.assert_array_equal(
                        tensor(together, tap.name, step, seq), tensor(alone, tap.name, step)
                    )


def test_forced_tokens_are_read_and_a_sequence_leaves_when_they_end(tmp_path: Path) -> None:
    model_dir = tiny_variant(tmp_path, "qwen2-tied")
    long, short = GoldenSequence((3, 4), (10, 11, 12)), GoldenSequence((5,), (20,))
    session = recorded(tmp_path / "golden.session", model_dir, long, short, steps=3)
    steps = [{s.seq: s for s in session.step(step).sequences} for step in session.steps()]
    assert [sorted(step) for step in steps] == [[0, 1], [0, 1], [0], [0]]
    assert [tuple(step[0].ids) for step in steps] == [(3, 4), (10,), (11,), (12,)]
    assert [(step[0].emitted, step[0].forced) for step in steps[:3]] == [(10, True), (11, True), (12, True)]
    assert not steps[3][0].forced  # after the last forced token the reference chooses
    assert (steps[1][1].ids, steps[1][1].forced) == ((20,), False)


def test_top_k_and_normaliser_are_those_of_the_logits(family: tuple[Path, Session, str]) -> None:
    _, session, _ = family
    (sequence,) = session.step(0).sequences
    logits = tensor(session, "logits")[0].astype(np.float64)
    assert len(sequence.topk_ids) == TOP_K
    np.testing.assert_array_equal(sequence.topk_logits, np.sort(logits)[::-1][:TOP_K])
    np.testing.assert_array_equal(logits[list(sequence.topk_ids)], sequence.topk_logits)
    assert sequence.logsumexp == pytest.approx(np.logaddexp.reduce(logits), rel=1e-12)
    probs = np.exp(logits - sequence.logsumexp)
    assert sequence.entropy == pytest.approx(-(probs * np.log(probs)).sum(), rel=1e-9)


def test_statistics_are_those_of_the_tensors(family: tuple[Path, Session, str]) -> None:
    _, session, _ = family
    stats = session.stats(0)
    assert stats is not None
    for tap in session.taps:
        row = stats[tap.index, 0]
        if tap.name in session.meta.absent:
            assert np.isnan(row).all()
            continue
        x = tensor(session, tap.name)
        x = x[np.isfinite(x)].astype(np.float64)
        expected = [x.min(), x.max(), x.mean(), np.sqrt((x**2).mean()), abs(x).max(), 0, 0]
        np.testing.assert_allclose(row[:7], expected, rtol=1e-6, atol=1e-9)


def test_nothing_listens_afterwards(tmp_path: Path) -> None:
    recorded(tmp_path / "golden.session", tiny_variant(tmp_path, "llama"), steps=0)
    assert attention._listeners == {}


def test_a_tied_head_may_lie_in_the_file_as_well(tmp_path: Path) -> None:
    model_dir = tiny_variant(tmp_path, "qwen2-tied")
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, {"format": "pt"}
    )
    assert len(recorded(tmp_path / "golden.session", model_dir, steps=0).steps()) == 1


@pytest.mark.parametrize(
    ("lost", "variant"),
    [
        ("lm_head.weight", "llama"),
        ("model.layers.1.self_attn.q_proj.bias", "qwen2-tied"),
        ("model.norm.weight", "qwen3"),
    ],
)
def test_missing_weights_are_refused(lost: str, variant: str, tmp_path: Path) -> None:
    """transformers would fill them with random numbers and go on: the very bug that is hunted."""
    model_dir = tiny_variant(tmp_path, variant)
    file = model_dir / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if name != lost}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ReferenceFailure, match=f"has no {lost}"):
        recorded(tmp_path / "golden.session", model_dir)


def test_left_over_and_misshapen_weights_are_refused(tmp_path: Path) -> None:
    model_dir = tiny_checkpoint(tmp_path, "llama")
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, file, {"format": "pt"})
    with pytest.raises(ReferenceFailure, match=r"no place for.* model\.layers\.0\.self_attn\.q_proj\.bias"):
        recorded(tmp_path / "a.session", model_dir)
    save_file(weights | {"lm_head.weight": torch.ones(7, 64)}, file, {"format": "pt"})
    with pytest.raises(ReferenceFailure, match=r"in another shape .*lm_head\.weight.*7, 64"):
        recorded(tmp_path / "b.session", model_dir)


@pytest.mark.parametrize(
    ("sequence", "steps", "message"),
    [
        (GoldenSequence((3, 131)), 1, "token id 131 is outside the vocabulary of 131"),
        (GoldenSequence((3,), (500,)), 1, "token id 500 is outside"),
        (GoldenSequence(tuple([3] * 250)), 10, "250 prompt tokens and 10 steps exceed the context of 256"),
    ],
)
def test_ids_that_do_not_fit_the_model_are_refused(
    sequence: GoldenSequence, steps: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ReferenceFailure, match=message) as refused:
        recorded(tmp_path / "golden.session", tiny_variant(tmp_path, "llama"), sequence, steps=steps)
    assert refused.value.exit_code == 2


def test_a_foreign_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ReferenceFailure, match="model_type 'gpt2'; the reference records qwen2"):
        recorded(tmp_path / "golden.session", tmp_path)


def test_a_prompt_in_chunks_has_the_numbers_of_a_whole_one(tmp_path: Path) -> None:
    """Row by row, in float64; a chunk emits nothing, and a shorter prompt goes on decoding meanwhile."""
    model_dir = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    sequences = GoldenSequence(PROMPT), GoldenSequence((9, 8))
    whole = recorded(tmp_path / "whole.session", model_dir, *sequences, steps=4, dtype="float64")
    chunks = recorded(tmp_path / "chunks.session", model_dir, *sequences, steps=4, dtype="float64", chunk=5)
    with whole, chunks:
        reported = [chunks.step(step).sequences for step in chunks.steps()]
        assert [len(step[0].ids) for step in reported] == [5, 5, 4, 1, 1]
        assert [step[0].emitted is None for step in reported] == [True, True, False, False, False]
        assert [chunks.step(step).phase for step in chunks.steps()] == ["prefill"] * 3 + ["decode"] * 2
        first = [step[0].emitted for step in reported[2:]]
        assert first == [whole.step(step).sequences[0].emitted for step in range(3)]
        assert [step[1].ids for step in reported] == [whole.step(step).sequences[1].ids for step in range(5)]
        for tap in ("layers.1.attn.context", "layers.1.mlp_residual"):
            rows = np.concatenate([tensor(chunks, tap, step) for step in range(3)])
            np.testing.assert_allclose(rows, tensor(whole, tap), rtol=0, atol=1e-12)
        np.testing.assert_allclose(tensor(chunks, "logits", 4), tensor(whole, "logits", 2), atol=1e-12)
        assert tensor(chunks, "layers.0.attn.probs", 1).shape[1:] == (5, 10)


def test_what_a_chunked_recording_emitted_is_what_another_is_forced_onto(tmp_path: Path) -> None:
    model_dir = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    recorded(tmp_path / "a.session", model_dir, GoldenSequence(PROMPT), steps=4, chunk=6).close()
    (forced,) = forced_onto(tmp_path / "a.session")
    assert (forced.prompt, len(forced.forced or ())) == (PROMPT, 3)
    with recorded(tmp_path / "b.session", model_dir, forced, steps=4, chunk=6) as again:
        emitted = [again.step(step).sequences[0].emitted for step in again.steps()]
    assert emitted == [None, None, *(forced.forced or ())]
