"""The layers one by one: normalisation as transformers has it, and splits over ranks that add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import NormForm
from lockstep.engine.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from lockstep.engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from lockstep.engine.layers.weight import Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT
from lockstep.engine.rules.defaults import act_and_mul, additive_bias, share_kv_heads, within_window
from lockstep.engine.rules.norm import rms_norm
from lockstep.engine.taps.names import tap_specs
from tests.checkpoints import tiny_config

STORE = Store(torch.float32, torch.device("cpu"), CORRECT, kept=False)
MODEL = replace(ModelConfig.from_hf(tiny_config("qwen2").to_dict()), vocab_size=13)
PLACES = {spec.name: i for i, spec in enumerate(tap_specs(1))}
WIRING = Wiring(CORRECT, lambda name: None, PLACES, "layers.0.")


class Alone(Comm):
    """One rank of several without the others: its part of a sum is all that it gets."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_rms_norm_is_transformers(dtype: torch.dtype, eps: float) -> None:
    """To the bit in 16-bit types, where the order of rounding and weight shows."""
    norm = LlamaRMSNorm(64, eps).to(dtype)
    norm.weight.data = noise(64, seed=3).to(dtype)
    x = (noise(5, 64) * torch.tensor([[1e-3], [1.0], [30.0], [1e-6], [5.0]])).to(dtype)
    found, expected = rms_norm(x, norm.weight.data, eps), norm(x).detach()
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    else:
        assert (found == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "form"), [(Olmo2RMSNorm, "wide"), (Gemma2RMSNorm, "plus_one")])
def test_other_forms_of_the_norm_are_transformers(theirs: Any, form: NormForm, dtype: torch.dtype) -> None:
    """To the bit in 16-bit types: the weight is applied before the result is rounded."""
    norm = theirs(64, 1e-5).to(dtype)
    norm.weight.data = noise(64, seed=3).to(dtype)
    x = noise(5, 64).to(dtype)
    found, expected = rms_norm(x, norm.weight.data, 1e-5, form), norm(x).detach()
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert (rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6) == 0).all()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_qkv_ranks_compute_their_heads_of_the_whole(tp: int) -> None:
    """With more ranks than KV heads, neighbours hold the same head."""
    x, out = noise(3, 64), {part: [] for part in "qkv"}
    full = {part: (noise(rows, 64, seed=i), noise(rows, seed=9 + i))
            for i, (part, rows) in enumerate((("q", 64), ("k", 16), ("v", 16)))}  # fmt: skip
    for rank in range(tp):
        layer = QKVParallelLinear("a", MODEL, tp, shards.qkv_by_heads(MODEL, tp, rank), STORE)
        layer.bind(WIRING)
        for part, span in zip("qkv", layer.plan.rows, strict=True):
            layer.parameters()[f"a.{part}_proj.weight"].copy_(full[part][0][span.start : span.stop])
            layer.parameters()[f"a.{part}_proj.bias"].copy_(full[part][1][span.start : span.stop])
        for part, y in zip("qkv", layer(x), strict=True):
            out[part].append(y)
    for part in "qkv":
        replicas = 1 if part == "q" else shards.kv_replicas(MODEL, tp)
        assert all((y == out[part][i // replicas * replicas]).all() for i, y in enumerate(out[part]))
        whole = torch.cat(out[part][::replicas], dim=1)
        torch.testing.assert_close(whole, F.linear(x, *full[part]), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_merged_parts_keep_their_own_spans(tp: int) -> None:
    """Rank r has rows r of gate and rows r of up, not the first rows of gate and the next of gate."""
    gate, up, x = noise(96, 64, seed=1), noise(96, 64, seed=2), noise(3, 64)
    parts = []
    for rank in range(tp):
        span = shards.even(96, tp, rank)
        layer = MergedColumnParallelLinear(["g", "u"], [span, span], 64, True, STORE)
        layer.parameters()["g.weight"].copy_(gate[span.start : span.stop])
        layer.parameters()["u.weight"].copy_(up[span.start : span.stop])
        parts.append(layer(x))
        assert (layer.parameters()["g.bias"] == 0).all()  # a bias that nobody writes is no bias
    torch.testing.assert_close(torch.cat([g for g, _ in parts], 1), x @ gate.T, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([u for _, u in parts], 1), x @ up.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_parallel_partials_sum_to_the_whole_and_the_bias_counts_once(tp: int) -> None:
    weight, bias, x = noise(64, 96, seed=1), noise(64, seed=2), noise(3, 96)
    outs = []
    for rank in range(tp):
        span = shards.even(96, tp, rank)
        layer = RowParallelLinear("o", span, 64, True, Alone(rank, tp), STORE)
        layer.bind(WIRING, "attn.o_proj")
        layer.parameters()["o.weight"].copy_(weight[:, span.start : span.stop])
        layer.parameters()["o.bias"].copy_(bias)
        outs.append(layer(x[:, span.start : span.stop].contiguous()) - bias)
    torch.testing.assert_close(sum(outs) + bias, F.linear(x, weight, bias), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_split_vocabulary_looks_up_and_scores_every_id_once(tp: int) -> None:
    """13 rows over 8 ranks: the last rank owns nothing."""
    table, ids, last = noise(13, 6), torch.arange(13), noise(2, 6, seed=5)
    rows, logits = [], []
    for rank in range(tp):
        span = shards.vocab(13, tp, rank)
        layer = VocabParallelEmbedding(replace(MODEL, hidden_size=6), Alone(rank, tp), STORE)
        layer.weight.parts()["model.embed_tokens.weight"].copy_(table[span.start : span.stop])
        layer.bind(replace(WIRING, prefix=""))
        rows.append(layer(ids))
        head = VocabParallelHead(layer.weight, MODEL)
        head.bind(replace(WIRING, prefix=""))
        logits.append(head(last))
    assert (sum(rows) == table).all()
    torch.testing.assert_close(torch.cat(logits, dim=1), last @ table.T)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_the_mask_is_its_definition(window: int | None) -> None:
    allowed = within_window(torch.arange(4, 9), slice(0, 5), torch.arange(9), window)
    assert (within_window(torch.arange(4, 9), slice(2, 4), torch.arange(9), window) == allowed[2:4]).all()
    for i, q in enumerate(range(4, 9)):
        for k in range(9):
            assert allowed[i, k] == (k <= q and (window is None or q - k < window))
    bias = additive_bias(allowed)
    assert (bias[allowed] == 0).all()
    assert (bias[~allowed] == -torch.inf).all()


def test_query_heads_read_their_groups_kv_head() -> None:
    kv = noise(7, 3, 4)
    read = share_kv_heads(kv, 3, 2)
    each = read.expand(-1, 2, -1, -1).flatten(0, 1)
    assert (each == kv.repeat_interleave(2, dim=1).transpose(0, 1)).all()
    assert read.untyped_storage().data_ptr() == kv.untyped_storage().data_ptr()


def test_the_gate_is_what_is_activated() -> None:
    gate, up = noise(3, 5), noise(3, 5, seed=1)
    torch.testing.assert_close(act_and_mul(gate, up, "silu"), gate * torch.sigmoid(gate) * up)
