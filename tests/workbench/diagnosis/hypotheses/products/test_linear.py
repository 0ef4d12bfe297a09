"""Linear layers: bugs in transformers' own projections, named from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.hypotheses import roundings
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.workbench.diagnosis.synthetic import Case, tiny_case
from tests.workbench.diagnosis.variants.made import accepted
from tests.workbench.diagnosis.variants.patched import Patch, recorded, wrong_sites

pytestmark = pytest.mark.sampled_file(3)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Qwen2 of 8 heads of 8, as many KV heads, so that k_proj and v_proj are square as well."""
    return tiny_case(tmp_path_factory.mktemp("untied"), num_key_value_heads=8, tie_word_embeddings=False)


TAPS = {"q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.o_proj",
        "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down"}  # fmt: skip


def module(model: Any, name: str, layer: int = 1) -> Any:
    """ "q" -> the q_proj of layer 1."""
    block = model.model.layers[layer]
    return getattr(block.self_attn if len(name) == 1 else block.mlp, f"{name}_proj")


def put(parameter: Any, value: Tensor) -> None:
    parameter.copy_(value.clone())


def feed(module: Any, change: Any) -> None:
    """The module gets `change(x)` instead of its input x [1, T, in]."""
    module.register_forward_pre_hook(lambda _module, args: (change(args[0]), *args[1:]))


def interleave(x: Tensor, head_dim: int = 8) -> Tensor:
    heads = x.view(-1, 2, head_dim // 2, *x.shape[1:])
    return heads.transpose(1, 2).reshape(x.shape)


def lora(weight: Tensor, rank: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    down, up = (
        torch.randn(rank, weight.shape[1], generator=generator),
        torch.randn(weight.shape[0], rank, generator=generator),
    )
    return weight + 0.02 * up @ down


def initial(weight: Tensor) -> Tensor:
    return 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))


def shuffled(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(5))


def one_weight(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight[5, 9] += 0.3
    return weight


def rows_zero(weight: Tensor) -> Tensor:
    weight = weight.clone()
    weight[8:16] = 0
    return weight


def int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def int4_groups(weight: Tensor) -> Tensor:
    grouped = weight.view(-1, 32)
    scale = grouped.abs().amax(1, keepdim=True) / 7
    return ((grouped / scale).round() * scale).view(weight.shape)


def nf4(weight: Tensor) -> Tensor:
    return torch.from_numpy(
        roundings.WEIGHTS["4-bit NormalFloat (NF4) in blocks of 64"](weight.numpy())
    ).float()


def six_bits(weight: Tensor) -> Tensor:
    groups = weight.view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 31
    codes = ((groups / scale).round().int() + 32) & 15
    return ((codes - 32) * scale).view(weight.shape)


def e4m3_as_e5m2(weight: Tensor) -> Tensor:
    return weight.to(torch.float8_e4m3fn).view(torch.float8_e5m2).float()


def another_scale(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * torch.cat([scale[:, :1], scale[:, :-1]], 1)


def block_scale(weight: Tensor) -> Tensor:
    return weight * torch.tensor([1.0, 1.25]).repeat_interleave(32)


def heads_reversed(weight: Tensor) -> Tensor:
    return weight.view(8, 8, 64).flip(0).reshape(64, 64)


def merged_wrongly(weight: Tensor) -> Tensor:
    """For contexts whose heads were merged as (head_dim, heads)."""
    return weight.view(64, 8, 8).transpose(1, 2).reshape(64, 64)


def channels(weight: Tensor) -> Tensor:
    return weight * torch.linspace(0.5, 2, len(weight))[:, None]


def shifted(x: Tensor) -> Tensor:
    return x.roll(1, 1) if x.shape[1] > 1 else x


def in_decode(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x) if x.shape[1] == 1 else x


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def zero_points_of_another_format(weight: Tensor) -> Tensor:
    """GPTQ's first format keeps them less one."""
    groups = weight.double().reshape(-1, 32)
    low, high = groups.amin(1, True), groups.amax(1, True)
    step = (high - low) / 15
    zero = (-low / step).round()
    codes = ((groups / step).round() + zero).clamp(0, 15)
    return ((codes - (zero - 1)) * step).reshape(weight.shape).float()


#: module of layer 1 whose weight is changed; how; name; words of the sentence
WEIGHTS: list[tuple[str, Callable[[Tensor], Tensor], str, str]] = [
    ("o", lambda w: w.T, "transposed", "o_proj.weight is used transposed"),
    ("q", lambda w: w.T, "transposed", "used transposed"),
    ("down", lambda w: w.reshape(96, 64).T, "transposed", "used transposed"),
    ("q", interleave, "rows_permuted", "interleaved"),
    ("k", heads_reversed, "rows_permuted", "whole heads: 7, 6"),
    ("o", merged_wrongly, "head_order", "transposed heads"),
    ("down", lambda w: w.roll(1, 0), "rows_permuted", "another order"),
    ("up", lambda w: 2 * w, "factor", "2 times what it should be, doubled"),
    ("q", lambda w: w / 8**0.5, "factor", "1 / sqrt(head_dim)"),
    ("gate", channels, "channel_scale", "96 out features"),
    ("o", block_scale, "feature_scale", "1 blocks of 32 in features count 1.25"),
    ("v", torch.zeros_like, "weight_zero", "never loaded: nothing but the bias"),
    ("up", torch.zeros_like, "weight_zero", "never loaded: nothing comes out"),
    ("q", initial, "weight_unrelated", "standard deviation 0.02 (the checkpoint's have"),
    ("down", lambda w: w.view(64, 2, -1).mT.reshape(w.shape), "columns_permuted", "as 48 × 2, transposed"),
    (
        "o",
        lambda w: w[:, shuffled(64)],
        "columns_permuted",
        "are in another order: column 0 meets in feature",
    ),
    ("v", lora, "low_rank", "matrix of rank 2"),
    (
        "down",
        one_weight,
        "single_weights",
        "one weight differs in model.layers.1.mlp.down_proj.weight: [5, 9]",
    ),
    ("up", rows_zero, "rows_zero", "8 rows"),
    ("gate", int8, "low_precision_weight", "int8 with a scale per row"),
    ("o", int4_groups, "low_precision_weight", "int4 in groups of 32"),
    ("o", nf4, "low_precision_weight", "NF4) in blocks of 64"),
    ("down", rounded, "low_precision_weight", "rounded to bfloat16"),
    ("o", six_bits, "misread", "without their upper 2 bits"),
    (
        "k",
        zero_points_of_another_format,
        "misread",
        "in groups of 32, whose zero points are read one too low",
    ),
    ("gate", e4m3_as_e5m2, "misread", "written as float8 e4m3 and read as e5m2"),
]

#: module of layer 1 whose bias is changed, from the model; name; words
BIASES: list[tuple[str, Callable[[Any], Tensor], str, str]] = [
    ("q", lambda m: torch.zeros(64), "bias_dropped", "q_proj.bias is not added"),
    ("k", lambda m: 2 * module(m, "k").bias, "bias_repeated", "added 2 times"),
    ("q", lambda m: module(m, "q", 2).bias, "bias_of_another", "layers.2.self_attn.q_proj.bias"),
    ("k", lambda m: module(m, "v").bias, "bias_of_another", "v_proj.bias is added"),
    ("q", lambda m: module(m, "q").bias.flip(0), "bias_permuted", "another order"),
    ("q", lambda m: module(m, "q").bias + 0.01 * torch.arange(64), "constant_row", "same vector"),
]

#: module of layer 1 whose weight is another's: module, layer; words
OTHERS: list[tuple[str, str, int, str]] = [
    ("q", "q", 0, "q_proj.weight of the layer before is used"),
    ("k", "v", 1, "v_proj of the same layer is used"),
    ("gate", "up", 1, "up_proj of the same layer"),
    ("down", "down", 2, "down_proj.weight of the next layer is used"),
]

#: module of layer 1 whose input is changed; how; name; words
INPUTS: list[tuple[str, Callable[[Tensor], Tensor], str, str]] = [
    ("gate", rounded, "low_precision_input", "input is rounded to bfloat16"),
    ("o", torch.zeros_like, "input_zero", "all zeros"),
    ("gate", in_decode(torch.zeros_like), "input_zero", "input is all zeros where it is wrong"),
    ("gate", shifted, "row_of_another_token", "the row of the one 1 before"),
    ("gate", lambda x: x.clamp(-0.75, 0.75), "input_clamped", "cut off at ±0.75"),
    ("up", another_scale, "input_token_scales", "in eight bits has a factor of its own"),
    ("v", another_scale, "input_token_scales", "the scale of the token before"),
    ("o", lambda x: x.unflatten(-1, (8, 8)).flip(-2).flatten(-2), "head_order", "reverse"),
]


def bugs() -> Iterator[tuple[str, Patch, str, str]]:
    """(module, what is put in, name, words)"""
    for name, weight, cause, words in WEIGHTS:
        yield name, lambda m, n=name, w=weight: put(module(m, n).weight, w(module(m, n).weight)), cause, words
    for name, bias, cause, words in BIASES:
        yield name, lambda m, n=name, b=bias: put(module(m, n).bias, b(m)), cause, words
    for name, of, layer, words in OTHERS:
        patch = lambda m, n=name, o=of, i=layer: put(module(m, n).weight, module(m, o, i).weight)  # noqa: E731
        yield name, patch, "weight_of_sibling" if layer == 1 else "weight_of_another", words
    for name, change, cause, words in INPUTS:
        yield name, lambda m, n=name, c=change: feed(module(m, n), c), cause, words


BUGS = list(bugs())


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "patch", "cause", "words"), BUGS, ids=[f"{n}-{c}" for n, _, c, _ in BUGS])
def test_a_projection_that_is_wrong_is_named(
    untied: Case, tmp_path: Path, name: str, patch: Patch, cause: str, words: str
) -> None:
    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", patch))
    tap = f"layers.1.{TAPS[name]}"
    assert list(wrong) == [tap]
    found = accepted(wrong[tap])
    assert cause in [one.variant.name for one in found[:1]], [one.variant.text for one in found]
    assert words in found[0].variant.text


def test_the_stream_before_the_norm_went_in(untied: Case, tmp_path: Path) -> None:
    def skip_norm(model: Any) -> None:
        kept: list[Tensor] = []
        layer = model.model.layers[1]
        layer.register_forward_pre_hook(lambda _m, args, kwargs: kept.append(args[0]), with_kwargs=True)
        feed(layer.self_attn.v_proj, lambda x: kept[-1])

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", skip_norm))
    (fit, *_) = accepted(wrong["layers.1.attn.v_proj"])
    assert (fit.variant.name, fit.variant.fitted["input"]) == ("wrong_input", "layers.0.mlp_residual")


def test_only_the_first_steps_of_decode_are_wrong_and_told(untied: Case, tmp_path: Path) -> None:
    """A bias that is dropped where one token is read: the rows say so, and a single row suffices to name it."""

    def dropped(model: Any) -> None:
        module(model, "q").register_forward_hook(
            lambda m, args, out: out - m.bias if out.shape[1] == 1 else out
        )

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", dropped))
    site = wrong["layers.1.attn.q_proj"]
    assert site.deviation is not None
    assert site.deviation.steps == (1, 2)
    (fit, *_) = accepted(site)
    assert (fit.variant.name, fit.everywhere) == ("bias_dropped", False)


def test_errors_that_hide_each_other_are_reported(untied: Case, tmp_path: Path) -> None:
    """Of two factors that are zero neither has an effect by itself."""

    def starved(model: Any) -> None:
        for name in ("gate", "up"):
            feed(module(model, name), in_decode(torch.zeros_like))

    session = recorded(untied, tmp_path / "engine.session", starved)
    facts = Facts.of(untied.model_dir, "float32")
    (cause,) = diagnose(session, facts, golden=untied.golden).causes
    assert (cause.name, cause.place) == ("input_zero", "layers.1.mlp.{gate,up}, decode")


def test_a_plain_pack_cut_out_as_if_by_heads(untied: Case, tmp_path: Path) -> None:
    """Eight heads and as many KV heads: query, key and value of each would lie together."""

    def cut(model: Any) -> None:
        sides = [module(model, name) for name in "qkv"]
        for part in ("weight", "bias"):
            pack = torch.cat([getattr(side, part) for side in sides]).unflatten(0, (8, 3, 8))
            for i, side in enumerate(sides):
                put(getattr(side, part), pack[:, i].flatten(0, 1).clone())

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", cut))
    assert {name: accepted(site)[0].variant.name for name, site in wrong.items()} == {
        f"layers.1.attn.{kind}_proj": "pack_by_kv_heads" for kind in "qkv"
    }


def test_one_head_with_anothers_rows(untied: Case, tmp_path: Path) -> None:
    def repeat(model: Any) -> None:
        for vector in (module(model, "q").weight, module(model, "q").bias):
            vector[24:32] = vector[16:24].clone()

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", repeat))
    site = wrong["layers.1.attn.q_proj"]
    assert site.deviation is not None
    assert site.deviation.heads == (3,)
    (fit, *_) = accepted(site)
    assert fit.variant.name == "rows_repeated"
    assert "column 24 is row 16" in fit.variant.text


def test_an_adapter_that_only_decode_applies(untied: Case, tmp_path: Path) -> None:
    """Four tokens, and an error in one direction: three had to be without one."""

    def adapted(model: Any) -> None:
        change = lora(torch.zeros(64, 64), rank=1)
        module(model, "v").register_forward_hook(
            lambda m, args, out: out + args[0] @ change.T if out.shape[1] == 1 else out
        )

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", adapted))
    (fit, *_) = accepted(wrong["layers.1.attn.v_proj"])
    assert fit.variant.name == "low_rank"
    assert "matrix of rank 1" in fit.variant.text
    assert "for 4 of" in fit.variant.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tokens", ["all", "decode"])
@pytest.mark.parametrize("name", ["q", "o", "down"])
def test_random_damage_has_no_cause(untied: Case, tmp_path: Path, name: str, tokens: str) -> None:
    """Numbers of the right size: different, and nothing that is known."""

    def random(model: Any) -> None:
        numbers = torch.Generator().manual_seed(7)
        module(model, name).register_forward_hook(
            lambda m, args, out: (
                torch.randn(out.shape, generator=numbers) if tokens == "all" or out.shape[1] == 1 else out
            )
        )

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", random))
    assert accepted(wrong[f"layers.1.{TAPS[name]}"]) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_at_16_bits(untied: Case, tmp_path: Path, dtype: str) -> None:
    def dropped(model: Any) -> None:
        put(module(model, "q").bias, torch.zeros(64))
        put(module(model, "down", 2).weight, module(model, "down", 0).weight)

    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", dropped, dtype))
    assert list(wrong) == ["layers.1.attn.q_proj", "layers.2.mlp.down"]
    names = [accepted(site)[0].variant.name for site in wrong.values()]
    assert names == ["bias_dropped", "weight_of_another"]
