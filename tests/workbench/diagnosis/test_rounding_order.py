"""In what order a 16-bit engine rounds, found from its bits: transformers with one operation written otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.graph.formula import FORMULAS, Node, substitute
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.mismatch.report import compare_runs
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.rounding_order import _SUM, RoundingOrder, _best, _Rounded, rounding_orders
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.recording import Recordings

pytestmark = pytest.mark.sampled_file(2)

LAYERS = range(3)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"), steps=1)


def orders(
    recordings: Recordings, name: str, patch: Callable[[Patched], None], dtype: str = "bfloat16"
) -> list[RoundingOrder]:
    recorded = recordings.of(Bug(name, "", (), "", Place(()), patch, "qwen3-kv4", dtype))
    with Session.open(recorded.engine, UNLIMITED) as ours, Session.open(recorded.floor, UNLIMITED) as floor:
        facts = Facts.of(recorded.checkpoint, dtype)
        taps, theirs = RecordedTaps(Recording(ours)), RecordedTaps(Recording(floor))
        found = list(rounding_orders(taps, theirs, facts))
        notes = diagnose(ours, facts, floor=floor).notes
    assert [one.in_words(len(LAYERS)) for one in found] == [
        note for note in notes if "another rounding" in note
    ]
    return found


def rms(norm: Any, x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def late(p: Patched) -> None:
    """transformers rounds a Qwen3 norm before its weight."""
    for _, layer in p.layers():
        norm = layer.mlp_norm if hasattr(layer, "mlp_norm") else layer.post_attention_layernorm
        p.wrap(norm, lambda forward, x, norm=norm: (rms(norm, x) * norm.weight.float()).to(x.dtype))


def test_a_norm_that_is_rounded_after_its_weight(recordings: Recordings) -> None:
    (found,) = orders(recordings, "late", late)
    assert found.taps == tuple(f"layers.{i}.mlp_norm" for i in LAYERS)
    assert (found.more, found.less) == ((), ("x / sqrt(mean(x²) + eps)",))
    assert found.shares is not None
    assert found.shares[0] > 0.995
    assert found.shares[1] < 0.9
    assert found.in_words(3).startswith(
        "within what bfloat16 allows, another rounding than the reference's: layers.*.mlp_norm: does not round "
        "x / sqrt(mean(x²) + eps), which the reference does (its order gives "
    )


def test_a_reciprocal_that_is_rounded_before_the_row_is_multiplied_by_it(recordings: Recordings) -> None:
    def patch(p: Patched) -> None:
        for _, layer in p.layers():
            norm = layer.post_attention_layernorm

            def low(forward: Any, x: Tensor, norm: Any = norm) -> Tensor:
                inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
                return norm.weight * (x * inverse.to(x.dtype))

            p.wrap(norm, low)

    (found,) = orders(recordings, "reciprocal", patch)
    assert found.taps == tuple(f"layers.{i}.mlp_norm" for i in LAYERS)
    assert (found.more, found.less) == (("1 / sqrt(mean(x²) + eps)",), ())


def test_one_layer_alone_is_named(recordings: Recordings) -> None:
    def patch(p: Patched) -> None:
        norm = p.decoder.layers[1].input_layernorm
        p.wrap(norm, lambda forward, x: (rms(norm, x) * norm.weight.float()).to(x.dtype))

    (found,) = orders(recordings, "one_layer", patch)
    assert found.taps == ("layers.1.attn_norm",)


def test_a_rotation_in_float32(recordings: Recordings) -> None:
    def wide(apply: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        found = apply(q.float(), k.float(), cos.float(), sin.float())
        return found[0].to(q.dtype), found[1].to(q.dtype)

    (found,) = orders(recordings, "wide_rotation", lambda p: p.rotate(wide))
    assert set(found.taps) == {f"layers.{i}.attn.{one}_rope" for i in LAYERS for one in "qk"}
    assert found.more == ()
    assert found.less == ("x * cos", "rotate_half(x) * sin"), "its tables are rounded as the reference's are"


def test_an_activation_in_float32(recordings: Recordings) -> None:
    def patch(p: Patched) -> None:
        for i, _ in p.layers():
            mlp = p.mlp(i)

            def fused(forward: Any, x: Tensor, mlp: Any = mlp) -> Tensor:
                gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
                return mlp.down_proj((nn.functional.silu(gate) * up).to(x.dtype))

            p.wrap(mlp, fused)

    (found,) = orders(recordings, "fused_activation", patch)
    assert found.taps == tuple(f"layers.{i}.mlp.act" for i in LAYERS)
    assert (found.more, found.less) == ((), ("silu(gate)",))


def test_the_reference_itself_rounds_as_it_does(recordings: Recordings) -> None:
    assert orders(recordings, "nothing", lambda p: None) == []


def test_where_the_weight_is_one_no_order_can_be_told_from_another(recordings: Recordings) -> None:
    """x * 1 rounded is x rounded times 1."""

    def patch(p: Patched) -> None:
        late(p)
        for _, layer in p.layers():
            p.weight(layer.post_attention_layernorm, torch.ones_like)

    assert orders(recordings, "ones", patch) == []


def test_nothing_of_32_bits(recordings: Recordings) -> None:
    assert orders(recordings, "late32", late, "float32") == []


@pytest.mark.slow
def test_a_rollout_that_rounds_otherwise_than_its_trainer(recordings: Recordings) -> None:
    recorded = recordings.of(Bug("late", "", (), "", Place(()), late, "qwen3-kv4", "bfloat16"))
    with Session.open(recorded.engine, UNLIMITED) as ours, Session.open(recorded.floor, UNLIMITED) as theirs:
        facts = Facts.of(recorded.checkpoint, "bfloat16")
        found = compare_runs(ours, theirs, facts=lambda session: facts)
    assert found.answer is not None
    assert found.answer.name == "operation"
    assert "layers.0.mlp_norm has equal inputs and another output" in found.answer.text
    (detail,) = found.answer.details
    assert "another rounding than the trainer's: layers.*.mlp_norm: does not round x / sqrt" in detail


NORM = substitute(FORMULAS["norm"], {"x": _SUM})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_orders_are_those_that_torch_computed(dtype: str, early: bool, fused: bool) -> None:
    """A norm behind a sum: of the sum in float32 or rounded, rounded before its weight or after it."""
    narrow = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    x, y, w = (torch.randn(shape, generator=generator).to(narrow) for shape in ((8, 256), (8, 256), (256,)))
    read = x.float() + y.float() if fused else (x + y).float()
    normed = read * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + 1e-6)
    out = normed.to(narrow) * w if early else (normed * w.float()).to(narrow)
    given = {"stream": wide(x), "branch": wide(y), "weight": wide(w), "eps": 1e-6}
    (least, *_) = sorted(_best(_Rounded(NORM, given, wide(out), dtype), NORM), key=len)
    names = {path: node.name for path, node in _paths(NORM)}
    assert sorted(names[path] for path in least) == ["add"] * (0 if fused else 2) + ["divide"] * early


def wide(x: Tensor) -> Any:
    return x.double().numpy().astype(np.float64)


def _paths(node: Node, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Node]]:
    return [(path, node), *(one for i, arg in enumerate(node.args) for one in _paths(arg, (*path, i)))]
