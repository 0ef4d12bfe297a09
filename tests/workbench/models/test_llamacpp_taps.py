"""llama.cpp's names and layouts, without llama.cpp."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lockstep.engine.taps.names import tap_specs
from lockstep.workbench.models.llamacpp_taps import ABSENT, Shape, TapNames, arrange


def interleaved(rows: np.ndarray) -> np.ndarray:
    """Rows of q as llama.cpp's converter writes them for `llama`."""
    return rows.reshape(SHAPE.heads, 2, SHAPE.head_dim // 2, -1).swapaxes(1, 2).reshape(rows.shape)


SHAPE = Shape(heads=4, kv_heads=2, head_dim=6, interleaved=True)

#: One layer as llama.cpp computes it, with biases, without a name for the attention's output (qwen2, qwen3).
LAYER = [
    ("norm-0", "RMS_NORM", None),
    ("attn_norm-0", "MUL", "attn_norm"),
    ("Qcur-0", "MUL_MAT", "attn.q_proj"),
    ("Qcur-0", "ADD", "attn.q_proj"),
    ("Qcur-0", "RESHAPE", None),
    ("Qcur_normed-0", "MUL", "attn.q_norm"),
    ("Qcur-0", "ROPE", "attn.q_rope"),
    ("Vcur-0", "MUL_MAT", "attn.v_proj"),
    ("Vcur-0", "RESHAPE", None),
    ("Kcur-0", "MUL_MAT", "attn.k_proj"),
    ("Kcur_normed-0", "MUL", "attn.k_norm"),
    ("Kcur-0", "ROPE", "attn.k_rope"),
    ("Kcur-0 (view)", "VIEW", None),
    ("cache_k_l0 (view)", "SET_ROWS", None),
    ("cache_v_l0 (reshaped) (view)", "SET_ROWS", None),
    ("cache_k_l0 (view)", "VIEW", "attn.k_cache"),
    ("cache_k_l0 (view) (permuted)", "PERMUTE", None),
    ("kq-0", "MUL_MAT", "attn.scores"),
    ("kq_soft_max-0", "SOFT_MAX", "attn.probs"),
    ("cache_v_l0 (view)", "VIEW", "attn.v_cache"),
    ("kqv-0", "MUL_MAT", None),
    ("kqv_out-0", "CONT", "attn.context"),
    ("node_31", "MUL_MAT", "attn.o_proj"),
    ("node_32", "GET_ROWS", None),
    ("ffn_inp-0", "ADD", "attn_residual"),
    ("ffn_norm-0", "MUL", "mlp_norm"),
    ("node_36", "MUL_MAT", None),
    ("ffn_gate-0", "MUL_MAT", "mlp.gate"),
    ("ffn_up-0", "MUL_MAT", "mlp.up"),
    ("ffn_swiglu-0", "GLU", "mlp.act"),
    ("ffn_out-0", "MUL_MAT", "mlp.down"),
    ("l_out-0", "ADD", "mlp_residual"),
]


def test_every_tap_of_a_layer_has_its_tensor_and_no_other_has_a_tap() -> None:
    names = TapNames()
    assert names.tap("embd", "GET_ROWS") == "embed"
    for name, operation, expected in LAYER:
        assert names.tap(name, operation) == (expected and f"layers.0.{expected}"), (name, operation)
    assert names.tap("result_norm", "MUL") == "final_norm"
    assert names.tap("result_output", "MUL_MAT") == "logits"
    mapped = {f"layers.0.{expected}" for *_, expected in LAYER if expected}
    ours = {spec.name for spec in tap_specs(1, {"qk_norm"})}
    assert ours - mapped == {"embed", "final_norm", "logits", *(f"layers.0.{name}" for name in ABSENT)}


def test_rows_of_q_come_back_in_the_order_that_rope_of_transformers_expects() -> None:
    """Rotating pairs (2i, 2i + 1) of llama.cpp's rows is rotating (i, i + D/2) of ours."""
    rng = np.random.default_rng(0)
    tokens, heads, dim = 5, SHAPE.heads, SHAPE.head_dim
    weight, x = rng.normal(size=(heads * dim, 8)), rng.normal(size=(tokens, 8))
    ours = (x @ weight.T).astype(np.float32)
    theirs = (x @ interleaved(weight).T).astype(np.float32)
    positions = range(3, 3 + tokens)
    np.testing.assert_allclose(
        arrange("layers.1.attn.q_proj", theirs[None, None], SHAPE, positions), ours, rtol=1e-6
    )
    angles = np.outer(positions, 10000.0 ** (-np.arange(0, dim, 2) / dim))
    turned = theirs.reshape(tokens, heads, -1, 2)
    pairs = (turned[..., 0] + 1j * turned[..., 1]) * np.exp(1j * angles)[:, None]
    rotated = np.stack([pairs.real, pairs.imag], -1).reshape(1, tokens, heads, dim).astype(np.float32)
    both = torch.tensor(np.concatenate([angles, angles], -1))
    q = torch.tensor(ours).reshape(1, tokens, heads, dim).transpose(1, 2).double()
    right, _ = apply_rotary_pos_emb(q, q, both.cos()[None], both.sin()[None])
    np.testing.assert_allclose(
        arrange("layers.0.attn.q_rope", rotated, SHAPE, positions),
        right[0].transpose(0, 1).numpy(),
        atol=1e-5,
    )


def test_q_of_other_architectures_stays_as_it_is() -> None:
    x = np.arange(2 * 24, dtype=np.float32).reshape(1, 1, 2, 24)
    plain = Shape(4, 2, 6, interleaved=False)
    np.testing.assert_array_equal(arrange("layers.0.attn.q_proj", x, plain, range(2)), x[0, 0])


def test_caches_and_attention_lose_their_padding_and_scores_get_scale_and_mask() -> None:
    plain, positions = Shape(4, 2, 6, interleaved=False), range(2, 5)  # three tokens after two cached ones
    k = np.random.default_rng(1).normal(size=(1, 256, 2, 6)).astype(np.float32)
    v = k.transpose(0, 3, 2, 1)  # as llama.cpp stores it without flash attention
    for tap, x in (("layers.0.attn.k_cache", k), ("layers.0.attn.v_cache", v)):
        np.testing.assert_array_equal(arrange(tap, x, plain, positions), k[0, :5])
    kq = np.ones((1, 4, 3, 256), np.float32)
    scores = arrange("layers.0.attn.scores", kq, plain, positions)
    assert scores.shape == (4, 3, 5)
    for row, position in enumerate(positions):
        assert (scores[:, row, : position + 1] == np.float32(1 / math.sqrt(6))).all()
        assert (scores[:, row, position + 1 :] == -math.inf).all()
    assert arrange("layers.0.attn.probs", kq, plain, positions).shape == (4, 3, 5)


@pytest.mark.parametrize(("tap", "rows"), [("logits", 1), ("final_norm", 3), ("layers.0.mlp.gate", 3)])
def test_only_logits_are_of_the_last_token_alone(tap: str, rows: int) -> None:
    x = np.arange(3 * 7, dtype=np.float32).reshape(1, 1, 3, 7)
    np.testing.assert_array_equal(arrange(tap, x, SHAPE, range(3)), x[0, 0, -rows:])
