"""Wrong contexts are named by what was done to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names

pytestmark = pytest.mark.sampled_file(3)

DIM = 16


def values(change: Callable[[Tensor, At], Tensor]) -> Callable[[Tensor, At], Tensor]:
    """Probabilities times changed values."""
    return lambda x, at: times(at.taps["probs"], change(at.taps["v_cache"], at))


def probs(change: Callable[[Tensor, At], Tensor]) -> Callable[[Tensor, At], Tensor]:
    """Changed probabilities times values."""
    return lambda x, at: times(change(at.taps["probs"], at), at.taps["v_cache"])


def times(p: Tensor, v: Tensor) -> Tensor:
    v = v.repeat_interleave(len(p) // v.shape[1], 1)
    return torch.stack([p[h] @ v[:, h] for h in range(len(p))], 1).flatten(1)


def of_heads(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, At], Tensor]:
    """[T, heads, D] changed."""
    return lambda x, at: change(x.view(len(x), -1, DIM)).reshape(len(x), -1)


def layer_0(x: Tensor, at: At) -> Tensor:
    return at.run.held["layers.0.attn.v_cache", at.rank][-1]


def first_sequence(v: Tensor, at: At) -> Tensor:
    """The other sequence's values, where it is long enough."""
    other = [
        x
        for x, one in zip(at.run.held[f"layers.{at.layer}.attn.v_cache", 0], at.run.passes, strict=False)
        if one.seq == 0
    ]
    return other[-1][: len(v)] if at.seq == 1 else v


def first_context(x: Tensor, at: At) -> Tensor:
    """The prompt's contexts of the first sequence, for the second one."""
    contexts = at.run.held.get((f"layers.{at.layer}.attn.context", at.rank), [])
    other = [
        c for c, one in zip(contexts, at.run.passes, strict=False) if one.seq == 0 and one.step == at.step
    ]
    return other[0][: len(x)] if at.seq == 1 and not at.step else x


def own(p: Tensor, at: At) -> Tensor:
    hot = torch.zeros_like(p)
    rows = torch.arange(p.shape[1])
    hot[:, rows, at.start + rows] = 1
    return hot


CONTEXTS: list[tuple[str, Any, str, str]] = [
    ("tiled", values(lambda v, at: v[:, [h % 4 for h in range(8)]]), "kv_heads_tiled", "h % n"),
    ("reversed", values(lambda v, at: v.flip(1)), "kv_heads_reversed", "reversed"),
    ("all 0", values(lambda v, at: v[:, :1].repeat(1, 4, 1)), "kv_heads_all_0", "KV head 0"),
    ("keys", values(lambda v, at: at.taps["k_cache"]), "cache_keys_for_values", "as values are the keys"),
    ("layer 0", values(layer_0), "cache_of_another_layer", "those of layer 0"),
    ("context of sequence 0", first_context, "context_of_sequence", "sequence 0's tokens of the step"),
    ("sequence 0", values(first_sequence), "cache_of_another_sequence", "sequence 0"),
    (
        "behind",
        values(lambda v, at: torch.cat([v[:1] * 0, v[:-1]])),
        "cache_rows_shifted",
        "stands -1 from it",
    ),
    (
        "newest missing",
        values(lambda v, at: torch.cat([v[:-1], v[:1] * 0])),
        "cache_rows_zero",
        "not there yet",
    ),
    ("own value", probs(own), "probs_of_own_key", "own key"),
    (
        "own in decode",
        probs(lambda p, at: own(p, at) if at.step else p),
        "probs_of_own_key",
        "own key",
    ),
    (
        "first value",
        lambda x, at: at.taps["v_cache"][:1].repeat_interleave(2, 1).expand(len(x), -1, -1).flatten(1),
        "probs_of_first_key",
        "first key",
    ),
    (
        "mean",
        probs(lambda p, at: (p > 0) / (p > 0).sum(-1, keepdim=True)),
        "probs_uniform",
        "same probability",
    ),
    (
        "transposed",
        probs(lambda p, at: p.transpose(1, 2) if p.shape[1] == p.shape[2] else p),
        "probs_transposed",
        "transposed",
    ),
    (
        "scores",
        probs(lambda p, at: at.taps["scores"].nan_to_num(neginf=0)),
        "softmax_missing",
        "no softmax",
    ),
    (
        "no merge",
        of_heads(lambda x: x.transpose(0, 1)),
        "context_tokens_not_transposed",
        "without being transposed",
    ),
    ("dim by head", of_heads(lambda x: x.transpose(1, 2)), "context_heads_by_dim", "[D, heads]"),
    ("heads reversed", of_heads(lambda x: x.flip(1)), "merged_heads_moved", "head 0 has those of head 7"),
    (
        "groups",
        of_heads(lambda x: x.unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2)),
        "merged_heads_moved",
        "head 1 has those of head 2",
    ),
    ("rolled", of_heads(lambda x: x.roll(1, 1)), "merged_heads_moved", "head 0 has those of head 7"),
    (
        "head 3 zero",
        of_heads(lambda x: x * (torch.arange(8) != 3)[:, None]),
        "context_heads_zero",
        "heads 3 give nothing",
    ),
    (
        "last rows never stored",
        lambda x, at: x * (torch.arange(len(x)) < 6)[:, None],
        "context_heads_zero",
        "give nothing",
    ),
    ("scaled", lambda x, at: x * 1.5, "context_scaled", "1.5 times"),
    (
        "scaled heads",
        of_heads(lambda x: x * (1 + torch.arange(8))[:, None]),
        "context_scale_of_heads",
        "its own",
    ),
    (
        "two exchanged",
        of_heads(lambda x: x[:, [0, 5, 2, 3, 4, 1, 6, 7]]),
        "merged_heads_moved",
        "head 1 has those of head 5",
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spoil", "name", "words"), [one[1:] for one in CONTEXTS], ids=[one[0] for one in CONTEXTS]
)
def test_wrong_contexts_are_named(spoil: Any, name: str, words: str) -> None:
    found = causes(Run(model(), {"context": spoil}), "context")
    assert found, "nothing named"
    reported = [(one.variant.name, one.variant.text) for one in found[:3]]  # equal ones are all reported
    assert any(one == name and words in text for one, text in reported), reported


def test_the_step_before_s_values_are_reported_as_stale_or_missing() -> None:
    def stale(v: Tensor, at: At) -> Tensor:
        return torch.cat([v[: at.start], v[at.start :] * 0]) if at.start else v

    (first, *_) = causes(Run(model(), {"context": values(stale)}), "context")
    assert first.variant.text == (
        "cached values of the step itself are missing: they are not there yet, and read as zero"
    )


def test_one_rank_that_reads_the_other_s_values() -> None:
    def spoil(x: Tensor, at: At) -> Tensor:
        other = at.run.held[f"layers.{at.layer}.attn.v_cache", 0][-1]
        return times(at.taps["probs"], other) if at.rank else x

    run = Run(model(), {"context": spoil}, ranks=2)
    assert run.site("context", rank=0).deviation is None
    assert causes(run, "context", rank=1)[0].variant.text == "cached values: rows are those of rank 0"


def test_random_damage_to_the_context_is_not_blamed_on_anything() -> None:
    noise = torch.Generator().manual_seed(5)
    for size in (1e-3, 1.0):
        run = Run(model(), {"context": lambda x, at, s=size: x + s * torch.randn(x.shape, generator=noise)})
        assert run.site("context").deviation is not None
        assert names(run, "context") == []
