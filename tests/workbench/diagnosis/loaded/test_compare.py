"""Planted in the memory of two ranks: what is not the checkpoint's is named, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.workbench.diagnosis.loaded import compare
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, compare_weights
from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks
from tests.checkpoints import CLASSES, EVERY_VARIANT, tiny_checkpoint, tiny_variant
from tests.workbench.diagnosis.loaded.ranks import Bug, State, shard, whole_of, written

pytestmark = pytest.mark.sampled_file(2)

_QKV, _DOWN = "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.down_proj.weight"
_GATE_UP, _O = "model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.self_attn.o_proj.weight"
_NORM, _EMBED = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads, two of keys and values, three layers, norms and biases that are not constant."""
    path = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(
        path,
        "qwen2",
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


def compared(checkpoint: Path, tmp_path: Path, bug: Bug | None = None, size: int = 2) -> LoadedWeights:
    whole = whole_of(checkpoint)
    states = [shard(whole, rank, size, 2) for rank in range(size)]
    if bug is not None:
        bug(states)
    with LoadedFrom.open(checkpoint) as opened:
        return compare_weights(read_ranks(written(tmp_path / "dump", states)), opened)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_loaded_rightly_is_not_accused(checkpoint: Path, tmp_path: Path, size: int) -> None:
    """Four ranks have more than there are key and value heads."""
    found = compared(checkpoint, tmp_path, size=size)
    assert (found.wrong, found.unknown, found.left_out) == ((), (), ())
    assert found.compared == len(whole_of(checkpoint))


def _set(name: str, value: object, rank: int | None = None) -> Bug:
    """A tensor of a rank (None: of all) becomes what `value(tensor, states)` is."""

    def bug(states: list[State]) -> None:
        done = [one(state[name].clone(), states) for state in states]  # type: ignore[operator]
        for i, (state, new) in enumerate(zip(states, done, strict=True)):
            if rank in (None, i):
                state[name] = new.to(state[name].dtype).contiguous()

    one = value
    return bug


def _rows(name: str, start: int, stop: int, value: object, rank: int | None = None) -> Bug:
    def change(x: torch.Tensor, states: list[State]) -> torch.Tensor:
        x[start:stop] = value(x[start:stop], states)  # type: ignore[operator]
        return x

    return _set(name, change, rank)


def _exchanged(name: str) -> Bug:
    def bug(states: list[State]) -> None:
        states[0][name], states[1][name] = states[1][name], states[0][name]

    return bug


def _without(name: str) -> Bug:
    def bug(states: list[State]) -> None:
        for state in states:
            del state[name]

    return bug


def _normal(x: torch.Tensor, _: object) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) * 0.02


# Hidden 64, 4 heads of 16, 2 of keys and values, MLP 96: each of two ranks has 32 rows of q, 16 of k and v, 48 of gate.
_PLANTED: list[tuple[str, Bug, str, str]] = [
    ("biases never loaded", _set(f"{_QKV}.bias", lambda x, _: x * 0), "q_proj.bias", "zeros"),
    ("k bias never loaded", _rows(f"{_QKV}.bias", 32, 48, lambda x, _: x * 0), "k_proj.bias", "zeros"),
    ("norm left at one", _set(_NORM, lambda x, _: x * 0 + 1), "input_layernorm", "constant"),
    ("left as initialised", _set(_DOWN, _normal), "down_proj", "unrelated"),
    ("v left as initialised", _rows(f"{_QKV}.weight", 48, 64, _normal), "v_proj.weight", "unrelated"),
    (
        "gate and up exchanged",
        _set(_GATE_UP, lambda x, _: torch.cat([x[48:], x[:48]])),
        "gate_proj",
        "elsewhere",
    ),
    (
        "k and v exchanged",
        _rows(f"{_QKV}.weight", 32, 64, lambda x, _: torch.cat([x[16:], x[:16]])),
        "k_proj.weight",
        "elsewhere",
    ),
    (
        "k and v biases exchanged",
        _rows(f"{_QKV}.bias", 32, 64, lambda x, _: torch.cat([x[16:], x[:16]])),
        "k_proj.bias",
        "elsewhere",
    ),
    (
        "the next layer's",
        _set(_DOWN, lambda x, s: s[0][_DOWN.replace("1", "2", 1)]),
        "down_proj",
        "elsewhere",
    ),
    (
        "the norm before",
        _set(_NORM, lambda x, s: s[0][_NORM.replace("1", "0", 1)]),
        "input_layernorm",
        "elsewhere",
    ),
    ("another norm", _set(_NORM, lambda x, s: s[0]["model.norm.weight"]), "input_layernorm", "elsewhere"),
    ("ranks' columns exchanged", _exchanged(_O), "o_proj", "elsewhere"),
    ("ranks' rows exchanged", _exchanged(_GATE_UP), "gate_proj", "elsewhere"),
    ("every rank has rank 0's", _set(_DOWN, lambda x, s: s[0][_DOWN]), "down_proj", "elsewhere"),
    (
        "rank 1 has rank 0's k",
        _rows(f"{_QKV}.weight", 32, 48, lambda x, s: s[0][f"{_QKV}.weight"][32:48], 1),
        "k_proj.weight",
        "elsewhere",
    ),
    ("vocabulary of the other rank", _exchanged(_EMBED), "embed_tokens", "elsewhere"),
    (
        "heads in another order",
        _rows(f"{_QKV}.weight", 0, 32, lambda x, _: torch.cat([x[16:], x[:16]])),
        "q_proj.weight",
        "order",
    ),
    (
        "halves as neighbours",
        _rows(f"{_QKV}.weight", 0, 32, lambda x, _: x.view(2, 2, 8, 64).transpose(1, 2).reshape(32, 64)),
        "q_proj.weight",
        "order",
    ),
    (
        "bias as neighbours",
        _rows(f"{_QKV}.bias", 0, 32, lambda x, _: x.view(2, 2, 8).transpose(1, 2).reshape(32)),
        "q_proj.bias",
        "order",
    ),
    ("columns backwards", _set(_O, lambda x, _: x.flip(1)), "o_proj", "columns"),
    (
        "a square transposed",
        _rows(f"{_QKV}.weight", 32, 48, lambda x, _: x.T.reshape(16, 64)),
        "k_proj.weight",
        "transposed",
    ),
    ("scaled by sqrt(d)", _rows(f"{_QKV}.weight", 0, 32, lambda x, _: x * 0.25), "q_proj.weight", "scaled"),
    (
        "rows with their scales",
        _set(_DOWN, lambda x, _: x * torch.linspace(1, 2, len(x))[:, None]),
        "down_proj",
        "scaled rows",
    ),
    ("one more", _set(_NORM, lambda x, _: x + 1), "input_layernorm", "offset"),
    ("through float16", _set(_DOWN, lambda x, _: x.half().float()), "down_proj", "rounded"),
    (
        "an adapter merged",
        _set(_DOWN, lambda x, _: x + 0.1 * torch.randn(len(x), 2) @ torch.randn(2, x.shape[1])),
        "down_proj",
        "low rank",
    ),
    (
        "stale after a sync",
        _set(_DOWN, lambda x, _: x + 0.05 * x.std() * torch.randn(x.shape)),
        "down_proj",
        "near",
    ),
    ("a NaN", _rows(_DOWN, 3, 4, lambda x, _: x * torch.nan), "down_proj", "not finite"),
    ("some rows not loaded", _rows(_DOWN, 8, 16, lambda x, _: x * 0), "down_proj", "zeros"),
    ("no biases in the engine", _without(f"{_QKV}.bias"), "q_proj.bias", "missing"),
    (
        "no head rows on the last rank",
        _rows("lm_head.weight", 0, 64, lambda x, _: x * 0, 1),
        "lm_head",
        "zeros",
    ),
    (
        "not sharded",
        _set(_DOWN, lambda x, s: torch.cat([s[0][_DOWN], s[1][_DOWN], s[1][_DOWN]], 1)),
        "down_proj",
        "shape",
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("bug", "parameter", "kind"), [one[1:] for one in _PLANTED], ids=[one[0] for one in _PLANTED]
)
def test_what_is_not_the_checkpoints_is_named(
    checkpoint: Path, tmp_path: Path, bug: Bug, parameter: str, kind: str
) -> None:
    torch.manual_seed(0)
    found = compared(checkpoint, tmp_path, bug)
    named = {(one.parameter, one.mistake.kind) for one in found.wrong}
    assert any(parameter in name and kind == what for name, what in named), found.wrong
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    touched = next(
        (parts for parts in fused.values() if any(part in parameter for part in parts)), (parameter,)
    )
    assert all(any(part in name for part in touched) for name, _ in named), "and nothing else"


@pytest.mark.parametrize("planted", ["stale after a sync", "scaled by sqrt(d)"])
def test_rows_that_are_still_themselves_are_looked_for_nowhere(
    planted: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sync that failed all matrices are such: a table of all rows would take far longer than they do."""
    torch.manual_seed(0)
    monkeypatch.delattr(compare, "RowTable")
    bug, kind = next((one[1], one[3]) for one in _PLANTED if one[0] == planted)
    assert {one.mistake.kind for one in compared(checkpoint, tmp_path, bug).wrong} == {kind}


def printed(found: LoadedWeights) -> str:
    return "\n".join(f"{one.parameter} {one.ranks} {one.layers}: {one.mistake.text}" for one in found.wrong)


def test_words_say_whose_it_is(checkpoint: Path, tmp_path: Path) -> None:
    assert printed(compared(checkpoint, tmp_path / "a", _exchanged(_O))).splitlines() == [
        "model.layers.1.self_attn.o_proj.weight (0,) (1,): rank 1's part instead",
        "model.layers.1.self_attn.o_proj.weight (1,) (1,): rank 0's part instead",
    ]
    bug = _set(_NORM, lambda x, states: states[0][_NORM.replace("1", "0", 1)])
    assert (
        printed(compared(checkpoint, tmp_path / "b", bug))
        == f"{_NORM} (0, 1) (1,): the layer before's instead"
    )
    halves = next(one[1] for one in _PLANTED if one[0] == "halves as neighbours")
    assert "halves made neighbours, in every 16" in printed(compared(checkpoint, tmp_path / "c", halves))


def test_the_same_mistake_of_all_layers_is_one(checkpoint: Path, tmp_path: Path) -> None:
    def bug(states: list[State]) -> None:
        for state in states:
            for name in state:
                if name.endswith("qkv_proj.bias"):
                    state[name][32:] = 0

    (k, v) = compared(checkpoint, tmp_path, bug).wrong
    assert [one.parameter for one in (k, v)] == [f"model.layers.*.self_attn.{one}_proj.bias" for one in "kv"]
    assert (k.layers, k.ranks) == ((0, 1, 2), (0, 1))


def test_scales_that_are_all_zero(checkpoint: Path, tmp_path: Path) -> None:
    def bug(states: list[State]) -> None:
        for state in states:
            state["model.layers.0.mlp.down_proj.weight_scale"] = torch.zeros(64)

    (one,) = compared(checkpoint, tmp_path, bug).wrong
    assert (one.parameter, one.mistake.kind) == ("model.layers.0.mlp.down_proj.weight_scale", "zeros")


def test_wrapped_names_are_the_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    def bug(states: list[State]) -> None:
        for state in states:
            for name in list(state):
                new = "_fsdp_wrapped_module." + name.replace(
                    ".mlp.", "._checkpoint_wrapped_module.mlp._orig_mod."
                )
                state[new] = state.pop(name)

    assert compared(checkpoint, tmp_path, bug).wrong == ()


@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "qwen3_next", "deepseek_v3", "qwen3_moe"])
def test_tensors_as_transformers_holds_them(tmp_path: Path, family: str) -> None:
    """In whatever way the checkpoint stacks them; one of them is wrong."""
    checkpoint = tiny_checkpoint(tmp_path, family)
    whole = whole_of(checkpoint)
    name = next(one for one in sorted(whole) if ".1." in one and "down_proj" in one)
    for number, wrong in (("0", ()), ("1", ("zeros",))):
        state = {one: tensor * (0 if wrong and one == name else 1) for one, tensor in whole.items()}
        with LoadedFrom.open(checkpoint) as opened:
            found = compare_weights(read_ranks(written(tmp_path / number, [state])), opened)
        assert tuple(one.mistake.kind for one in found.wrong) == wrong
        assert found.left_out == ()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(EVERY_VARIANT, key=lambda name: "moe" not in name))
def test_what_transformers_holds_of_any_family_is_not_accused(name: str, tmp_path: Path) -> None:
    """Whatever it stacks once it has loaded a checkpoint, and calls otherwise."""
    family, _ = EVERY_VARIANT[name]
    checkpoint = tiny_variant(tmp_path, name)
    model = CLASSES[family][1].from_pretrained(checkpoint, dtype=torch.float32)
    with LoadedFrom.open(checkpoint) as opened:
        found = compare_weights(read_ranks(written(tmp_path / "dump", [dict(model.state_dict())])), opened)
    assert (found.wrong, found.unknown, found.left_out) == ((), (), ())
