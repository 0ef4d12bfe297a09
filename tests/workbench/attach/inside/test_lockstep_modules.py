"""Modules hooked by their names: every tap equals what the golden recorder's own hooks see in transformers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lockstep.workbench.attach.inside.lockstep_modules import attach, follow
from lockstep.workbench.attach.inside.lockstep_names import FUSED
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.references.hooks import tapped
from lockstep.workbench.references.loading import load_golden
from tests.checkpoints import tiny_checkpoint
from tests.workbench.attach.inside.fused_engine import FusedEngine, FusedNorm

pytestmark = pytest.mark.sampled_file(2)

IDS = [5, 17, 99, 3, 42, 7]
#: Taps of the design that neither map can see: attention is fused.
UNSEEN = re.compile(r".*\.(k_cache|v_cache|scores|probs)")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    return load_golden(path, "float32", "cpu")


@pytest.fixture(scope="module")
def golden(model: Any) -> dict[str, np.ndarray]:
    """Tap -> [T, …] of the prompt, by hooks of another author."""
    seen: dict[str, np.ndarray] = {}
    with torch.no_grad(), tapped(model, lambda tap, x: seen.update({tap: x.detach().clone().numpy()})):
        model(torch.tensor([IDS]))
    return {tap: x for tap, x in seen.items() if not UNSEEN.fullmatch(tap)}


def taps(folder: Path, index: int = 0, rank: int = 0) -> dict[str, np.ndarray]:
    one = list(LockstepDump.open(folder).passes(rank))[index]
    assert len({tensor.tap for tensor in one.tensors}) == len(one.tensors), "each tap once"
    return {tensor.tap: tensor.array for tensor in one.tensors if tensor.array is not None}


def record(model: Any, folder: Path) -> None:
    """One call on the ids, with every module hooked."""
    tape = Tape(folder, config=model.config)
    attach(model, tape)
    follow(model, tape)
    with torch.no_grad():
        model(torch.tensor([IDS]))
    tape.close()


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def test_every_tap_of_transformers(model: Any, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    before = hooks(model)
    tape = Tape(tmp_path, config=model.config)
    attach(model, tape)
    follow(model, tape)
    with torch.no_grad():
        model.generate(torch.tensor([IDS]), max_new_tokens=3, do_sample=False, use_cache=True)
    tape.close()
    assert hooks(model) == before
    found = taps(tmp_path)
    assert found.keys() == golden.keys()
    for tap, x in golden.items():
        if tap == "logits":  # of the last row alone, by another product
            np.testing.assert_allclose(found[tap], x[-1:], atol=1e-5)
        else:
            np.testing.assert_array_equal(found[tap].reshape(x.shape), x, err_msg=tap)
    read = list(LockstepDump.open(tmp_path).passes(0))
    assert [one.positions for one in read] == [tuple(range(6)), (6,), (7,)]
    assert read[0].ids == tuple(IDS)
    assert {name for one in read for name in one.requests or ()} == {"1.0"}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_every_tap_of_linear_attention_and_of_gated_attention(family: str, tmp_path: Path) -> None:
    """Stacked products are taken apart; of two sequences each has its own state."""
    model = load_golden(tiny_checkpoint(tmp_path, family), "float32", "cpu")
    seen: dict[str, np.ndarray] = {}
    with torch.no_grad(), tapped(model, lambda tap, x: seen.update({tap: x.detach().clone().numpy()})):
        model(torch.tensor([IDS]))
    tape = Tape(tmp_path / "dump", config=model.config)
    attach(model, tape)
    follow(model, tape)
    with torch.no_grad():
        model(torch.tensor([IDS[::-1], IDS]))
    tape.close()
    found = taps(tmp_path / "dump")
    wanted = {tap: x for tap, x in seen.items() if ".attn." in tap and not UNSEEN.fullmatch(tap)}
    made_again = {tap for tap in wanted if tap.endswith("_l2")}  # inside the rule
    assert {tap for tap in found if ".attn." in tap} == wanted.keys() - made_again
    assert any(tap.endswith("attn.state") for tap in found)
    for tap in wanted.keys() - made_again:
        mine = found[tap][len(found[tap]) // 2 :]
        np.testing.assert_allclose(mine.reshape(wanted[tap].shape), wanted[tap], atol=3e-5, err_msg=tap)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "gpt_oss", "minimax_m2"])
def test_every_tap_of_experts_but_their_rows(family: str, tmp_path: Path) -> None:
    """Choice and weights in the order of the experts' numbers, the shared expert, the sum."""
    model = load_golden(tiny_checkpoint(tmp_path, family), "float32", "cpu")
    seen: dict[str, np.ndarray] = {}
    with torch.no_grad(), tapped(model, lambda tap, x: seen.update({tap: x.detach().clone().numpy()})):
        model(torch.tensor([IDS]))
    record(model, tmp_path / "dump")
    found, wanted = taps(tmp_path / "dump"), {tap: x for tap, x in seen.items() if ".mlp." in tap}
    inside = {tap for tap in wanted if ".mlp.experts." in tap}
    assert {tap for tap in found if ".mlp." in tap} == wanted.keys() - inside
    assert inside
    for tap in wanted.keys() - inside:
        np.testing.assert_array_equal(found[tap].reshape(wanted[tap].shape), wanted[tap], err_msg=tap)


@pytest.mark.parametrize(
    ("family", "unseen"),
    [
        ("exaone4", r"layers\.1\.attn\.[qk]_rope"),  # which does not rotate
        ("hunyuan_v1_dense", ""),
        ("cohere2", r"layers\.1\.attn\.[qk]_rope|.*\.attn_residual"),  # added in one line with the MLP's term
        ("nemotron", r".*\.attn\.[qk]_rope"),  # rotates a part of each head by itself
        ("granitemoe", r".*\.mlp\.experts\..*"),
        ("ernie4_5_moe", r".*\.mlp\.experts\..*"),
        ("granitemoehybrid", r".*\.attn\.[qk]_rope|.*\.mlp\.experts\..*"),  # which does not rotate
        ("nemotron_h", r".*\.attn\.[qk]_rope|.*\.mlp\.experts\..*"),
        ("bamba", ""),
        ("falcon_h1", ""),
        ("llama4_text", r"layers\.[13]\.attn\.[qk]_rope|.*\.attn\.q_scaled|.*\.mlp\.experts\..*"),
    ],
)
def test_every_tap_of_families_that_are_others_but_for_a_few_flags(
    family: str, unseen: str, tmp_path: Path
) -> None:
    model = load_golden(tiny_checkpoint(tmp_path, family), "float32", "cpu")
    seen: dict[str, np.ndarray] = {}
    with torch.no_grad(), tapped(model, lambda tap, x: seen.update({tap: x.detach().clone().numpy()})):
        model(torch.tensor([IDS]))
    record(model, tmp_path / "dump")
    found = taps(tmp_path / "dump")
    hidden = re.compile(rf"{UNSEEN.pattern}|{unseen}")
    assert found.keys() == {tap for tap in seen if not hidden.fullmatch(tap)}
    for tap in found:
        np.testing.assert_array_equal(found[tap].reshape(seen[tap].shape), seen[tap], err_msg=tap)


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("deepseek_v2", "dynamic"),
        ("deepseek_v3", "dynamic"),
        ("deepseek_v3", "static"),
        ("deepseek_v32", "dynamic"),
        ("glm_moe_dsa", "dynamic"),
    ],
)
def test_every_tap_of_attention_of_latents_but_its_caches(family: str, cache: str, tmp_path: Path) -> None:
    """Of the product of all cached latents the rows of the new tokens, wherever a cache puts them."""
    model = load_golden(tiny_checkpoint(tmp_path, family), "float32", "cpu")
    tape = Tape(tmp_path / "dump", config=model.config)
    attach(model, tape)
    follow(model, tape)
    given = {"cache_implementation": cache, "max_new_tokens": 2, "do_sample": False}
    seen: dict[str, np.ndarray] = {}
    with torch.no_grad():
        ids = model.generate(torch.tensor([IDS]), **given)[:, :-1]
        tape.close()
        with tapped(model, lambda tap, x: seen.update({tap: x.detach().clone().numpy()})):
            model(ids)
    inside = "latent_cache|rope_cache|keys|values|index_(q_rope|k_rope|k_cache|scores)"
    cached = re.compile(rf"{UNSEEN.pattern}|.*\.({inside})")
    wanted = {tap for tap in seen if ".attn." in tap and not cached.fullmatch(tap)}
    prefill, decode = taps(tmp_path / "dump"), taps(tmp_path / "dump", 1)
    assert {tap for tap in prefill if ".attn." in tap} == wanted
    for tap in wanted:
        rows = np.concatenate([one[tap].reshape(-1, *seen[tap].shape[1:]) for one in (prefill, decode)])
        np.testing.assert_allclose(rows, seen[tap], atol=1e-5, err_msg=tap)


def test_a_batch_names_a_request_a_row_and_its_padding(model: Any, tmp_path: Path) -> None:
    tape = Tape(tmp_path, only=["embed", "logits"])
    attach(model, tape)
    follow(model, tape)
    ids, mask = torch.tensor([[0, 0, 5, 17], [9, 8, 7, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        for _ in range(2):  # the same once more: other requests
            model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    tape.close()
    first, second, third, _ = LockstepDump.open(tmp_path).passes(0)
    assert first.requests == ("", "", "1.0", "1.0", "1.1", "1.1", "1.1", "1.1")
    assert first.positions[2:4] == (0, 1)
    assert second.requests == ("1.0", "1.1")
    assert second.positions == (2, 4)
    assert third.requests is not None
    assert third.requests[-1] == "2.1"
    embed, logits = first.tensors
    assert embed.array is not None
    assert logits.array is not None
    assert embed.array.shape[0] == 8
    assert len(logits.array) == 8 or logits.rows == (3, 7)


def test_every_tap_of_a_fused_engine(model: Any, golden: dict[str, np.ndarray], tmp_path: Path) -> None:
    """RoPE, the norms and the residual overwrite what was tapped before, and each tap is what it was."""
    engine = FusedEngine(model)
    tape = Tape(tmp_path)
    attach(engine, tape)
    follow(engine, tape)
    with torch.no_grad():
        hidden = engine(input_ids=torch.tensor(IDS), positions=torch.arange(len(IDS)))
        assert tape.line is not None, "the pass waits for its logits"
        engine.compute_logits(hidden)
        assert tape.line is None
    tape.close()
    found = taps(tmp_path)
    partials = {tap for tap in found if tap.endswith(".partial")}
    assert found.keys() - partials == golden.keys()
    assert len(partials) == 2 * len(engine.model.layers)
    for tap in partials:
        np.testing.assert_array_equal(found[tap], found[tap.removesuffix(".partial")])
    for tap, x in golden.items():
        mine = found[tap].reshape(x[-1:].shape if tap == "logits" else x.shape)
        np.testing.assert_allclose(mine, x[-1:] if tap == "logits" else x, atol=2e-5, rtol=1e-4, err_msg=tap)
    assert hooks(engine) == 0
    assert all(
        "apply" not in vars(part.quant_method) for part in engine.modules() if hasattr(part, "quant_method")
    )


def test_without_the_copy_taps_of_a_fused_engine_are_wrong(
    model: Any, golden: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the copy is for: it is no caution."""
    whole = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda x, *a, copy=False, **k: whole(x, *a, **k))
    engine, tape = FusedEngine(model), Tape(tmp_path)
    attach(engine, tape)
    follow(engine, tape)
    with torch.no_grad():
        engine.compute_logits(engine(input_ids=torch.tensor(IDS), positions=torch.arange(len(IDS))))
    monkeypatch.undo()
    tape.close()
    wrong = []
    for tap, x in taps(tmp_path).items():
        right = golden[tap.removesuffix(".partial")]
        if tap != "logits" and not np.allclose(x.reshape(right.shape), right, atol=1e-3):
            wrong.append(tap)
    assert len(wrong) == 24
    assert {"embed", "layers.0.attn.o_proj", "layers.1.attn_residual", "layers.2.mlp.down"} <= set(wrong)


class Formula(FusedNorm):
    """A norm whose formula alone is computed: no hook of it runs."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def test_a_norm_over_all_heads_is_seen_though_its_module_is_not_called(tmp_path: Path) -> None:
    """As where an engine normalises what a rank has by itself: what is rotated is what the norm gave."""
    engine = FusedEngine(load_golden(tiny_checkpoint(tmp_path, "llama"), "float32", "cpu"))
    for layer in engine.model.layers:
        for name, size in (("q_norm", layer.self_attn.q_size), ("k_norm", layer.self_attn.kv_size)):
            weight = torch.linspace(0.5, 1.5, size)
            setattr(layer.self_attn, name, Formula(SimpleNamespace(weight=weight, variance_epsilon=1e-5)))
    tape = Tape(tmp_path / "dump")
    attach(engine, tape)
    follow(engine, tape)
    with torch.no_grad():
        engine.compute_logits(engine(input_ids=torch.tensor(IDS), positions=torch.arange(len(IDS))))
    tape.close()
    found = taps(tmp_path / "dump")
    for role in "qk":
        before = torch.tensor(found[f"layers.1.attn.{role}_proj"])
        right = F.rms_norm(before, before.shape[-1:], torch.linspace(0.5, 1.5, before.shape[-1]), 1e-5)
        np.testing.assert_allclose(found[f"layers.1.attn.{role}_norm"], right, atol=1e-6)
        assert not np.allclose(
            found[f"layers.1.attn.{role}_rope"][1:].reshape(right[1:].shape), right[1:], atol=1e-3
        )


def test_layouts_of_a_split_model(model: Any, tmp_path: Path) -> None:
    """Four ranks and two key heads: each is on two ranks. What is before the all-reduce is a partial sum."""
    engine = FusedEngine(model)
    heads = engine.model.layers[0].self_attn.total_num_kv_heads
    tape = Tape(tmp_path, 0, 2 * heads)
    attach(engine, tape)
    follow(engine, tape)
    with torch.no_grad():
        engine(input_ids=torch.tensor(IDS), positions=torch.arange(len(IDS)))
    tape.close()
    layouts = {x.tap: x.layout for x in next(LockstepDump.open(tmp_path).passes(0)).tensors}
    assert layouts["layers.1.attn.q_proj"] == layouts["layers.1.mlp.act"] == "shard(1)"
    assert layouts["layers.1.attn.k_rope"] == layouts["layers.1.attn.v_proj"] == "shard(1,replicas=2)"
    assert layouts["layers.0.attn.o_proj.partial"] == "partial"
    assert layouts["layers.0.mlp_residual"] == layouts["embed"] == "replicate"


class AllReducing(nn.Module):
    """nano-vllm's RowParallelLinear: no quant_method, all_reduce inside."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 3
        torch.distributed.all_reduce(y)
        return y


def test_partials_of_a_linear_that_reduces_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(x: Tensor) -> None:
        x.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", doubled)
    layer = nn.ModuleDict({"self_attn": nn.ModuleDict({"o_proj": AllReducing(), "qkv_proj": nn.Identity()})})
    model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    tape = Tape(tmp_path, 0, 2)
    attach(model, tape, FUSED | {".self_attn.qkv_proj": {}})
    tape.step([1, 2], 0)
    torch.distributed.all_reduce(torch.ones(2, 4))  # not of this part
    layer["self_attn"]["o_proj"](torch.ones(2, 4))
    tape.close()
    assert torch.distributed.all_reduce is doubled
    found = taps(tmp_path)
    assert (found["layers.0.attn.o_proj.partial"] == 3).all()
    assert (found["layers.0.attn.o_proj"] == 6).all()


class Mixture(nn.Module):
    """`mlp.gate` is the router here; experts see some of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        return torch.cat([self.experts[0](x[:1]), self.experts[1](x)])[1:]


@pytest.mark.parametrize("where", ["normalizer", "embedding_multiplier"])
def test_an_embedding_is_taken_as_the_model_multiplies_it(where: str, tmp_path: Path) -> None:
    """vLLM's Gemma and Granite multiply outside of the module."""
    text = nn.ModuleDict({"embed_tokens": nn.Embedding(9, 4), "layers": nn.ModuleList([nn.ModuleDict()])})
    setattr(text, where, 3.0)
    model, tape = nn.ModuleDict({"text": text}), Tape(tmp_path)
    attach(model, tape, FUSED)
    tape.step([1, 2, 3], 0)
    out = text["embed_tokens"](torch.tensor([1, 2, 3]))
    tape.close()
    torch.testing.assert_close(torch.from_numpy(taps(tmp_path)["embed"]), 3 * out.detach())


def test_unknown_modules_have_their_own_names(tmp_path: Path) -> None:
    layer = nn.ModuleDict({"mlp": Mixture()})
    vision = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.Identity()})])})
    text = nn.ModuleDict({"embed_tokens": nn.Embedding(9, 4), "layers": nn.ModuleList([layer])})
    model = nn.ModuleDict({"vision": vision, "text": text})
    tape = Tape(tmp_path)
    attach(model, tape)
    tape.step([1, 2, 3], 0)
    layer["mlp"](text["embed_tokens"](torch.tensor([1, 2, 3])))
    vision["layers"][0]["mlp"](torch.ones(3, 2))
    tape.close()
    assert list(taps(tmp_path)) == [
        "embed",
        "layers.0.mlp.router",
        "layers.0.mlp.experts.1[out]",
        "layers.0.mlp.combine",
        "vision.layers.0.mlp[out]",
    ]
    assert "1 outputs" in LockstepDump.open(tmp_path).facts.notes[0]


def test_a_tape_that_closes_in_the_middle_leaves_the_model_alone(model: Any, tmp_path: Path) -> None:
    """Hooks go away while torch walks over them: after enough passes, and at an error within one."""
    before, ids = hooks(model), torch.tensor([IDS])
    with torch.no_grad():
        expected = model(ids).logits
        for name, changes in (("enough", {"passes": 1}), ("error", {})):
            tape = Tape(tmp_path / name, **changes)
            attach(model, tape)
            follow(model, tape)
            assert hooks(model) > before
            assert torch.equal(model(ids).logits, expected)
            handle = model.model.layers[1].mlp.register_forward_hook(
                lambda *_, tape=tape: tape.tap("x", object()) if tape.index else None
            )
            assert torch.equal(model(ids).logits, expected)
            handle.remove()
            assert tape.closed
            assert hooks(model) == before
            assert len(list(LockstepDump.open(tmp_path / name).passes(0))) == 1


def test_what_a_raising_call_did_is_kept(model: Any, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("no such block")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    tape = Tape(tmp_path)
    attach(model, tape)
    follow(model, tape)
    with pytest.raises(ArithmeticError), torch.no_grad():
        model(torch.tensor([IDS]))
    handle.remove()
    with torch.no_grad():
        model(torch.tensor([IDS]))
        model(inputs_embeds=torch.ones(1, 2, model.config.hidden_size))
    tape.close()
    run = LockstepDump.open(tmp_path)
    cut, whole = run.passes(0)
    assert cut.tensors[-1].tap == "layers.1.mlp_norm"
    assert whole.tensors[-1].tap == "logits"
    assert run.facts.notes == (
        "rank 0: 1 calls without token ids are not recorded",
        "rank 0, pass 0: the engine raised ArithmeticError: no such block after layers.1.mlp_norm",
    )


def test_what_is_registered_after_a_recording_is_used(tmp_path: Path) -> None:
    """An entry of its own that a recording left in transformers' registry would hide it."""
    model = load_golden(tiny_checkpoint(tmp_path, "qwen3_next"), "float32", "cpu")
    name = model.config._attn_implementation
    record(model, tmp_path / "tape")
    known, calls = ALL_ATTENTION_FUNCTIONS[name], list[str]()

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(name)
        return known(*args, **named)

    AttentionInterface.register(name, counted)
    try:
        with torch.no_grad():
            model(torch.tensor([IDS]))
    finally:
        AttentionInterface.register(name, known)
    assert calls == [name] * model.config.layer_types.count("full_attention")
