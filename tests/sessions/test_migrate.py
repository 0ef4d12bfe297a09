"""Sessions of version 0.1 read as if they were of this one; the file stays as it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionError, SessionWriter
from lockstep.sessions.format import codec, migrate
from lockstep.sessions.meta import CaptureMeta, SamplingMeta
from lockstep.sessions.verify import verify
from tests.sessions.samples import as_version, create, put_meta, tamper, write

SHIPPED = Path(__file__).parent / "data" / "v0_1.session"


def test_a_shipped_recording_reports_what_it_did_before() -> None:
    before = SHIPPED.read_bytes()
    with Session.open(SHIPPED) as session:
        meta = session.meta
        assert (session.version, session.ranks, session.meta_problems) == (1, 2, [])
        assert (meta.model.name, meta.model.path, len(meta.model.checkpoint)) == ("demo", "demo", 32)
        assert (meta.model.num_layers, meta.model.num_heads, meta.model.num_kv_heads) == (4, 8, 2)
        assert (meta.model.eos_ids, meta.model.windows) == ((2002, 2000), (None,) * 4)
        assert (meta.config.tp, meta.config.dtype, meta.config.backend) == (2, "float32", "gloo")
        assert meta.rules == session.branches()[0].rules == {"mask": "additive"}
        assert meta.capture == CaptureMeta(last=("layers.*.attn.probs",), budget_bytes=4 << 20)
        assert meta.sequences[0].sampling == SamplingMeta()
        assert session.step(0).sequences[0].ids == meta.sequences[0].prompt_ids
        assert meta.token_texts[2001] == "<|im_start|>"
        shares = meta.weights[0]
        assert {share.rank for share in shares} == {0, 1}
        assert shares[0].shape == (1002, 256)
        assert shares[0].statistic("absmax") == pytest.approx(0.3222, abs=1e-3)
    assert verify(SHIPPED) == []
    assert SHIPPED.read_bytes() == before


def test_a_golden_session_of_version_1(tmp_path: Path) -> None:
    path = tmp_path / "golden.session"
    create(path).close()
    put_meta(
        path,
        source="transformers", checkpoint="cd", model="Qwen", dtype="float64", device="cpu", tp=1, steps=3,
        config={"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                "initializer_range": 0.02, "hidden_size": 64, "transformers_version": "5"},
        sequences=[{"prompt": [1, 2], "forced": [3]}, {"prompt": [4], "forced": None}],
        attention="eager", batching="alone", absent={"logits": "why"}, biases={"b": "AAAAAAAA8D8="},
    )  # fmt: skip
    as_version(path, 1)
    with Session.open(path) as session:
        meta = session.meta
        assert session.meta_problems == []
    assert (meta.model.name, meta.model.checkpoint, meta.model.num_layers, meta.model.rms_eps) == (
        "Qwen",
        "cd",
        2,
        1e-5,
    )
    assert (meta.config.dtype, meta.config.tp) == ("float64", 1)
    assert [(one.prompt_ids, one.forced) for one in meta.sequences.values()] == [((1, 2), (3,)), ((4,), None)]
    assert (meta.notes, meta.absent, len(meta.biases["b"])) == (("eager", "alone"), {"logits": "why"}, 8)


def test_figures_that_were_words() -> None:
    row = ["w", 0, "2×3", "float32", 0, 1, "NaN", "Infinity", "-Infinity", 0, 0, 0, "ff", "equal"]
    name, _, shape, _, figures, *rest = migrate.meta({"weights": {"0": [row]}})["weights"]["0"][0]
    assert (name, shape, rest) == ("w", [2, 3], ["ff", "equal"])
    assert math.isnan(figures[2])
    assert figures[3:5] == [math.inf, -math.inf]


def test_it_is_not_recorded_on(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    path.write_bytes(SHIPPED.read_bytes())
    with pytest.raises(SessionError, match="session format 1"):
        SessionWriter.reopen(path)
    assert path.read_bytes() == SHIPPED.read_bytes()


@pytest.mark.parametrize(("layers", "lengths"), [(3, ((5,) * 3, (4,) * 3)), (None, ((5,), (4,)))])
def test_one_length_a_rank_is_that_of_all_its_layers(
    tmp_path: Path, layers: int | None, lengths: tuple[tuple[int, ...], ...]
) -> None:
    path = write(tmp_path / "a.session", 1)
    tamper(path, "UPDATE sequences SET kv_lens = ?", arguments=(codec.encode_ints([5, 4]),))
    put_meta(path, model={"num_layers": layers})
    as_version(path, 1)
    with Session.open(path) as session:
        assert session.step(0).sequences[0].kv_lens == lengths
    assert verify(path) == []
