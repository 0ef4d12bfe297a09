"""What is read from memory at other places than it lies at, or was never written: made with torch in float64."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F

from tests.workbench.diagnosis.variants.made import ROWS, Array, best, drawn, made_site, names, of_model

RNG = np.random.default_rng(11)
N, EPS = len(ROWS), 1e-6
Q, K, V = (drawn(RNG, N, width) for width in (64, 32, 32))
GATE, UP = (drawn(RNG, N, 96) for _ in range(2))
QKV = {"layers.2.attn.q_proj": Q, "layers.2.attn.k_proj": K, "layers.2.attn.v_proj": V}
PASSES = [len(list(rows)) for _, rows in groupby(ROWS, lambda row: (row.step, row.seq))]


def by_stride(pack: list[Array], start: int, width: int) -> Array:
    """Of each pass of a sequence the elements of a packed row by torch's own strides."""
    found = []
    for rows in torch.tensor(np.concatenate(pack, axis=1)).split(PASSES):
        found.append(rows.clone().as_strided((len(rows), width), (width, 1), start))
    return torch.cat(found).numpy()


def test_a_norm_of_keys_that_steps_over_a_packed_row_by_its_own_width() -> None:
    weight = 1 + drawn(RNG, 16) / 4
    read = torch.tensor(by_stride([Q, K, V], 64, 32)).unflatten(1, (2, 16))
    seen = F.rms_norm(read, (16,), torch.tensor(weight), EPS).numpy()
    found = made_site(
        "norm", "layers.2.attn.k_norm", {"x": K.reshape(N, 2, 16)}, seen, others=QKV, model=of_model(qk_norm=True),
        weights={"model.layers.2.self_attn.k_norm.weight": weight},
    )  # fmt: skip
    (first,) = best(found)
    stated = (
        "a row of q and k and v, each token of a sequence sought by the width of k alone, is read instead of"
    )
    assert stated in first.variant.text


def test_an_activation_that_reads_gate_and_up_as_if_each_lay_by_itself() -> None:
    pack = [GATE, UP]
    gate, up = (torch.tensor(by_stride(pack, start, 96)) for start in (0, 96))
    others = {"layers.2.mlp.gate": GATE, "layers.2.mlp.up": UP}
    seen = (F.silu(gate) * up).numpy()
    found = made_site("activation", "layers.2.mlp.act", {"gate": GATE, "up": UP}, seen, others=others)
    (first,) = best(found)
    assert "of gate and up, each token of a sequence sought by the width of gate alone" in first.variant.text


def test_columns_that_are_never_written_and_hold_another_tensor() -> None:
    right = F.silu(torch.tensor(GATE)).numpy() * UP
    seen = np.concatenate([right[:, :80], Q[:, 8:24]], axis=1)
    others = {**QKV, "layers.2.mlp.gate": GATE, "layers.2.mlp.up": UP}
    found = made_site("activation", "layers.2.mlp.act", {"gate": GATE, "up": UP}, seen, others=others)
    assert names(found) == {"activation_columns_of_another"}
    stated = "columns from 80 on are not written: they hold attn.q_proj, from its column 8 on"
    assert best(found)[0].variant.text.startswith(stated)


def test_columns_of_a_product_that_hold_another_tensor() -> None:
    weight = drawn(RNG, 32, 64, size=0.1)
    x = drawn(RNG, N, 64)
    seen = x @ weight.T
    seen[:, 24:] = K[:, :8]
    found = made_site(
        "linear", "layers.2.attn.v_proj", {"x": x}, seen, others=QKV,
        weights={"model.layers.2.self_attn.v_proj.weight": weight},
    )  # fmt: skip
    assert names(found) == {"columns_of_another"}
    assert "columns from 24 on are not written: they hold layers.2.attn.k_proj" in best(found)[0].variant.text


def test_an_input_that_is_quantised_by_the_scale_of_the_step_before() -> None:
    weight, x = drawn(RNG, 96, 64, size=0.1), drawn(RNG, N, 64)
    for dtype, words in ((torch.float8_e4m3fn, "float8 (e4m3)"), (torch.int8, "int8")):
        read, before = [], {}
        for rows, one in zip(torch.tensor(x).split(PASSES), _firsts(), strict=True):
            own = rows.abs().max()
            most = before.get(one.seq)
            read.append(rows if most is None else _quantised(rows, most, dtype))
            before[one.seq] = own
        seen = torch.cat(read).numpy() @ weight.T
        found = made_site(
            "linear", "layers.2.mlp.up", {"x": x}, seen,
            weights={"model.layers.2.mlp.up_proj.weight": weight},
        )  # fmt: skip
        assert names(found) == {"input_scaled_late"}
        assert f"brought to {words} by a scale that is made of the sequence's" in best(found)[0].variant.text


def _firsts() -> list[object]:
    return [next(rows) for _, rows in groupby(ROWS, lambda row: (row.step, row.seq))]


def _quantised(rows: torch.Tensor, most: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top = 448.0 if dtype.is_floating_point else 127.0
    scaled = (rows / most * top).clamp(-top, top)
    codes = scaled.float().to(dtype) if dtype.is_floating_point else scaled.round()
    return codes.double() * most / top
