"""What a cache holds instead of what was written to it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workbench.diagnosis.variants.attention_run import At, Run, causes, model, names, rotate

pytestmark = pytest.mark.sampled_file(3)


def rows_of(at: At, name: str, seq: int | None = None, layer: int | None = None) -> Tensor:
    """Everything written so far by a sequence, [K, kv_heads, D]."""
    held = at.run.held[f"layers.{at.layer if layer is None else layer}.attn.{name}", at.rank]
    seq = at.seq if seq is None else seq
    rows = torch.cat([x for x, one in zip(held, at.run.passes, strict=False) if one.seq == seq])
    return rows.view(len(rows), -1, 16)


def decode(change: Callable[[Tensor, At], Tensor]) -> Callable[[Tensor, At], Tensor]:
    return lambda x, at: change(x, at) if at.step else x


def row(i: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, At], Tensor]:
    def spoil(x: Tensor, at: At) -> Tensor:
        x = x.clone()
        x[i] = change(x)
        return x

    return spoil


def int8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, True) / 127
    return (x / scale).round() * scale


def strided(x: Tensor, order: tuple[int, ...], *strides: int) -> Tensor:
    """Written in that order of its axes, read by those strides."""
    return x.permute(order).reshape(-1).as_strided(x.shape, strides)


def one_head_shuffled(x: Tensor, at: At) -> Tensor:
    return torch.stack(
        [x[:, 0], torch.cat([x[:2, 1].flip(0), x[2:3, 1], x[3:5, 1].flip(0), x[5:, 1]]), x[:, 2], x[:, 3]], 1
    )


def one_head_early(x: Tensor, at: At) -> Tensor:
    x = x.clone()
    x[-2, 3], x[-1, 3] = x[-1, 3].clone(), 0
    return x


def signed(x: Tensor) -> Tensor:
    """Bytes above 127 come back 256 steps too small."""
    least = x.amin(-1, True)
    scale = (x.amax(-1, True) - least) / 255
    codes = ((x - least) / scale).round()
    return torch.where(codes > 127, codes - 256, codes) * scale + least


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, True)


def frozen(x: Tensor, most: int = 127) -> Tensor:
    """Integers by the scale of the first row of each head: what is larger is clipped."""
    scale = x[:1].abs().amax(-1, True) / most
    return (x / scale).round().clamp(-most, most) * scale


def uint4(x: Tensor) -> Tensor:
    """From the least of each head on, in sixteen levels."""
    least = x.amin((0, 2), True)
    step = (x.amax((0, 2), True) - least) / 15
    return ((x - least) / step).round() * step + least


def in_vectors(x: Tensor, page: int, vector: int) -> Tensor:
    """[page, head, D / x, slot, x] read as [page, head, slot, D]."""
    pages = F.pad(x, (0, 0, 0, 0, 0, -len(x) % page)).unflatten(0, (-1, page)).unflatten(3, (-1, vector))
    tiled = pages.permute(0, 2, 3, 1, 4).flatten(2).unflatten(2, (page, -1))
    return tiled.transpose(1, 2).flatten(0, 1)[: len(x)]


def after_rows(x: Tensor, count: int) -> Tensor:
    """Each head's rows with so many numbers behind them, read as if there were none."""
    wide = torch.cat([x, x.abs().amax(-1, True).expand(-1, -1, count)], -1).transpose(0, 1).flatten(1)
    return wide[:, : len(x) * x.shape[2]].unflatten(1, (len(x), -1)).transpose(0, 1)


def of_prompt(x: Tensor, at: At) -> Tensor:
    """The largest numbers of each head's channels in the sequence's prompt."""
    return x[: next(len(one.rows) for one in at.run.passes if one.seq == at.seq)].abs().amax(0)


def hadamard(width: int) -> Tensor:
    found = torch.ones(1, 1)
    while len(found) < width:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / width**0.5


def turn(width: int) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0]


def foreign(seq: int) -> Tensor:
    return torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(seq))


def padded(other: Tensor, like: Tensor) -> Tensor:
    n = min(len(other), len(like))
    return torch.cat([other[:n], like[n:]])


CACHES: list[tuple[str, Any, str, str]] = [
    ("not used", decode(lambda x, at: x[-1:]), "cache_not_used", "only this step's"),
    ("newest missing", decode(lambda x, at: x[:-1]), "cache_newest_missing", "before it is written"),
    ("newest 4", lambda x, at: x[-4:], "cache_cut_at_front", "older ones were dropped"),
    ("zeros behind", lambda x, at: torch.cat([x, x[:3] * 0]), "cache_zero_rows", "beyond the sequence's length"),
    ("twice", decode(lambda x, at: torch.cat([x, x[-1:]])), "cache_rows_twice", "written twice"),
    ("zeros in front", decode(lambda x, at: torch.cat([x[:1] * 0, x])), "cache_rows_inserted", "before the first row"),
    ("more between", decode(lambda x, at: torch.cat([x[:3], x[:2] + 9, x[3:]])), "cache_rows_inserted", "row 3"),
    ("lost between", decode(lambda x, at: torch.cat([x[:2], x[4:]])), "cache_rows_dropped", "missing from row 2"),
    ("blocks exchanged", decode(lambda x, at: torch.cat([x[2:4], x[:2], x[4:]])), "cache_rows_wrong", "another order"),
    ("rotated", lambda x, at: rotate(x, torch.arange(len(x)), 1e4), "cache_values_rotated", "as keys are"),
    ("repeated", lambda x, at: x.repeat_interleave(2, 1), "cache_heads_repeated", "as attention reads it"),
    ("zero in decode", decode(lambda x, at: torch.cat([x[:-1], x[-1:] * 0])), "cache_rows_zero", "never written"),
    ("row 0 overwritten", decode(row(0, lambda x: x[-1])), "cache_newest_row", "newest token's"),
    ("shifted", lambda x, at: torch.cat([x[:1], x[:-1]]), "cache_rows_shifted", "1 position before"),
    ("heads reversed", lambda x, at: x.flip(1), "cache_heads_moved", "reversed"),
    ("layer 0", lambda x, at: rows_of(at, "v_proj", layer=0), "cache_of_another_layer", "layer 0"),
    ("sequence 0", lambda x, at: padded(rows_of(at, "v_proj", seq=0), x) if at.seq else x,
     "cache_of_another_sequence", "sequence 0"),
    ("keys", lambda x, at: rows_of(at, "k_rope"), "cache_keys_for_values", "holds keys"),
    ("scaled", lambda x, at: x * 0.25, "cache_scaled", "1/sqrt(head_dim)"),
    ("scaled by 1.1", decode(lambda x, at: x * 1.1), "cache_scaled", "1.1 times"),
    ("heads scaled", lambda x, at: x * torch.tensor([1.5, 2, 3, 4])[:, None], "cache_scaled_heads", "each KV head"),
    ("bf16", lambda x, at: x.bfloat16().float(), "cache_low_precision", "in bfloat16"),
    ("fp8", lambda x, at: x.to(torch.float8_e4m3fn).float(), "cache_low_precision", "float8 (e4m3)"),
    ("fp8 e5m2", lambda x, at: x.to(torch.float8_e5m2).float(), "cache_low_precision", "float8 (e5m2)"),
    ("int8", lambda x, at: int8_rows(x), "cache_low_precision", "int8"),
    ("range", lambda x, at: x.clamp(-of_prompt(x, at), of_prompt(x, at)), "cache_low_precision", "of the prompt alone"),
    ("hadamard", lambda x, at: x @ hadamard(16), "cache_transformed", "a Hadamard transform"),
    ("channels shuffled", lambda x, at: x[..., torch.randperm(16, generator=torch.Generator().manual_seed(1))],
     "cache_channels_ordered", "channels of each head are in another order"),
    ("turned", lambda x, at: x @ turn(16), "cache_channels_turned", "one orthogonal matrix"),
    ("mixed", lambda x, at: x @ (turn(16) + 0.5), "cache_channels_mixed", "go through one matrix"),
    ("layout", lambda x, at: x.transpose(0, 1).reshape(x.shape), "cache_layout", "[rows, heads, D]"),
    ("heads of rows", lambda x, at: x.reshape(4, -1, 16).transpose(0, 1), "cache_layout", "read as [heads, rows, D]"),
    ("transposed rows", lambda x, at: x.permute(1, 2, 0).reshape(4, -1, 16).transpose(0, 1), "cache_layout",
     "[heads, D, rows], is read as [heads, rows, D]: transposed"),
    ("transposed heads", lambda x, at: x.transpose(1, 2).reshape(x.shape), "cache_layout", "transposed"),
    ("head stride", decode(lambda x, at: strided(x, (1, 0, 2), 16, (len(x) - 1) * 16, 1)), "cache_strides",
     "from a head to the next by"),
    ("a channel late", decode(lambda x, at: torch.cat([x.reshape(-1)[1:], x.reshape(-1)[:1]]).view(x.shape)),
     "cache_strides", "from element 1 on (1 channel more)"),
    ("fixed scale", lambda x, at: (x * 127).round().clamp(-127, 127) / 127, "cache_cut_off",
     "in int8 with one scale, made for numbers up to 1"),
    ("frozen scale", lambda x, at: frozen(x), "quantised", "clipped to the ends"),
    ("4 bits", lambda x, at: uint4(x), "quantised", "quantised to 4 bits"),
    ("queries", lambda x, at: rows_of(at, "q_rope")[:, :4], "cache_queries", "the first heads"),
    ("heads of two layers", lambda x, at: torch.cat([x[:, :2], rows_of(at, "v_proj", layer=0)[:, 1:3]], 1),
     "cache_cells_wrong", "values of layer 0, 1 heads before"),
    ("rows of one head shuffled", decode(one_head_shuffled), "cache_cells_wrong", "row 0 of head 1 holds"),
    ("a head lands a slot early", decode(one_head_early), "cache_cells_wrong",
     "1 rows after their own; rows that nothing was written to are zero"),
    ("e4m3 as e5m2", lambda x, at: x.to(torch.float8_e4m3fn).view(torch.float8_e5m2).float(), "cache_other_format",
     "written as float8 e4m3 and read as e5m2"),
    ("no zero points", lambda x, at: x - x.amin(-1, True), "cache_other_format",
     "with a zero point for each row and read without it"),
    ("unsigned as signed", lambda x, at: signed(x), "cache_other_format", "and read as signed ones"),
    ("scale of the first row", lambda x, at: x / largest(x) * largest(x)[:1], "cache_scales", "of the first token"),
    ("eight bits, another scale", lambda x, at: int8_rows(x) / largest(x) * largest(x).roll(1, 1), "cache_scales",
     "in eight bits: it is restored by the scale of the head before"),
    ("vectors of 4 in pages of 8", lambda x, at: in_vectors(x, 8, 4), "cache_layout",
     "in pages of 8 slots by vectors of 4 dimensions and read as rows"),
    ("a scale behind each row", lambda x, at: after_rows(x, 2), "cache_layout", "with 2 elements between them and"),
    ("a prefix of somebody else", lambda x, at: torch.cat([foreign(at.seq), x[3:]]) if at.seq == 0 else x,
     "cache_foreign_prefix", "the first 3 rows of sequence 0"),
    ("rows 2 and 4", lambda x, at: torch.cat([x[:2], x[5:6], x[3:4], x[:1], x[5:]]), "cache_rows_wrong", "row 5"),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("spoil", "name", "words"), [one[1:] for one in CACHES], ids=[one[0] for one in CACHES]
)
def test_wrong_caches_are_named(spoil: Any, name: str, words: str) -> None:
    layers = lambda x, at: spoil(x, at) if at.layer == 1 else x  # noqa: E731
    site_only = Run(model(), {"v_cache": keep(layers)})
    found = causes(site_only, "v_cache")
    assert found, "nothing named"
    reported = [(one.variant.name, one.variant.text) for one in found[:3]]  # equal ones are all reported
    assert any(one == name and words in text for one, text in reported), reported


def keep(spoil: Any) -> Any:
    """What is read is spoilt; what is kept for the next step is not."""

    def read(x: Tensor, at: At) -> Tensor:
        return spoil(rows_of(at, "v_proj"), at)

    return read


def test_heads_of_another_stage_that_stand_in_each_other_s_place() -> None:
    """Two mistakes of one kernel, in decode."""
    found = causes(Run(model(), {"k_cache": decode(lambda x, at: rows_of(at, "k_proj").flip(1))}), "k_cache")
    assert (found[0].variant.name, found[0].variant.parameters) == ("cache_unrotated", 1)
    assert "heads stand in each other's place: head 0 is head 3" in found[0].variant.text


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda x, at: rows_of(at, "k_proj"), "cache_unrotated"),
        (lambda x, at: rotate(rows_of(at, "k_rope"), torch.arange(len(x)), 1e4), "cache_rotated_again"),
        (lambda x, at: rotate(rows_of(at, "k_rope"), torch.full((len(x),), 2), 1e4), "cache_rotated_offset"),
    ],
)
def test_keys_that_are_cached_with_another_rotation(spoil: Any, name: str) -> None:
    assert names(Run(model(), {"k_cache": spoil}), "k_cache")[0] == name


def test_what_is_cached_before_its_bias_or_its_norm_is_named() -> None:
    bias = torch.arange(1, 65, dtype=torch.float32)
    weights = {"model.layers.1.self_attn.v_proj.bias": bias.numpy()}
    early = {"v_cache": lambda x, at: x - bias.view(4, 16)}
    assert names(Run(model(), early, weights=weights), "v_cache") == ["cache_bias"]
    weight = torch.linspace(0.5, 2, 16)
    weights = {"model.layers.1.self_attn.k_norm.weight": weight.numpy()}
    twice = {"v_cache": lambda x, at: x * (x.square().mean(-1, True) + 1e-6).rsqrt() * weight}
    assert names(Run(model(), twice, weights=weights), "v_cache") == ["cache_normed"]


def test_random_damage_to_a_cache_is_not_blamed_on_anything() -> None:
    noise = torch.Generator().manual_seed(5)
    for size in (1e-3, 1.0):
        run = Run(model(), {"v_cache": lambda x, at, s=size: x + s * torch.randn(x.shape, generator=noise)})
        assert run.site("v_cache").deviation is not None
        assert names(run, "v_cache") == []
        longer = Run(model(), {"v_cache": lambda x, at: torch.randn(len(x) + 1, 4, 16, generator=noise)})
        assert names(longer, "v_cache") == []
