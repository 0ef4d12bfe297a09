"""What a session states of itself: one schema; what does not validate is not known, and never stops a reader."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import (
    CaptureMeta,
    ConfigMeta,
    ModelMeta,
    SamplingMeta,
    SequenceMeta,
    SessionMeta,
    WeightShare,
)
from lockstep.sessions.verify import verify
from tests.sessions.samples import TAPS, as_version, create, put_meta

WHOLE = SessionMeta(
    source="lockstep run",
    model=ModelMeta(
        name="demo", path="/m", checkpoint="ab", num_layers=2, eos_ids=(3, 4), windows=(None, 16), qk_norm=False,
        rope_scaling={"kind": "yarn", "factor": 4.0, "truncate": True, "mscale": None},
    ),
    config=ConfigMeta(tp=2, device="cpu", dtype="bfloat16", backend="gloo", timeout_seconds=math.inf),
    rules={"mask": "additive"},
    capture=CaptureMeta(full=("logits",), budget_bytes=4),
    sequences={
        0: SequenceMeta(prompt_ids=(1, 2), sampling=SamplingMeta(seed=2**63)),
        1: SequenceMeta(prompt_ids=(5,), forced=(6, 7)),
    },
    prompts=("a \ud800 b",),
    chat=False,
    versions={"torch": "2"},
    notes=("by hand",),
    absent={"logits": "not wanted"},
    biases={"b": b"\0\1\xff"},
    weights={0: (WeightShare("w", 1, (2, 3), "float32", (0.0, 1.0, 2.0, 3.0, math.inf, 5.0, 6.0, 6.0), "f", "equal"),)},
    token_texts={3: " a", 4: "\x1b"},
)  # fmt: skip


def test_all_of_it_survives(tmp_path: Path) -> None:
    SessionWriter.create(tmp_path / "a.session", taps=TAPS, ranks=2, meta=WHOLE).close()
    with Session.open(tmp_path / "a.session") as session:
        assert session.meta == WHOLE
        assert session.meta_problems == []
        assert session.branches()[0].rules == {"mask": "additive"}


def test_a_share_reports_its_statistics() -> None:
    (share,) = WHOLE.weights[0]
    assert (share.statistic("rms"), share.statistic("absmax"), share.equal, share.empty) == (
        3.0,
        math.inf,
        True,
        True,
    )


def test_fields_are_replaced_one_by_one_and_validated(tmp_path: Path) -> None:
    with create(tmp_path / "a.session", source="old", chat=True) as writer:
        writer.set_meta(source="new", prompts=("x",))
        for wrong in ({"prompts": 5}, {"model": {"num_layers": -1}}, {"nonsense": 1}, {"ranks": 3}):
            with pytest.raises(ValueError, match="meta"):
                writer.set_meta(**wrong)
    with Session.open(tmp_path / "a.session") as session:
        assert session.meta == SessionMeta(source="new", chat=True, prompts=("x",))


def test_pages_of_token_texts_are_one_mapping(tmp_path: Path) -> None:
    with create(tmp_path / "a.session", token_texts={1: "a"}) as writer, Session.open(writer.path) as session:
        writer.token_texts(1, {2: "b"})
        writer.token_texts(1, {2: "b", 3: "c"})
        assert session.refresh()
        assert session.meta.token_texts == {1: "a", 2: "b", 3: "c"}


def test_a_field_that_makes_no_sense_is_not_known_and_reported_by_verify(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    create(path, source="me", model=ModelMeta(name="demo")).close()
    put_meta(path, model={"num_layers": "many"}, sequences=[1], **{"token_texts.1": ["no"], "else": 3})
    with Session.open(path) as session:
        assert session.meta == SessionMeta(source="me")
    assert [problem.split(":")[0] for problem in verify(path)] == [
        "meta 'model'",
        "meta 'sequences'",
        "meta 'token_texts.1'",
    ]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_old = ("model_name", "model_path", "checkpoint", "dtype", "device", "tp", "backend", "attention", "batching")
_keys = st.sampled_from([*SessionMeta.__struct_fields__, *_old, "token_texts.7", "weights.1"])


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.dictionaries(_keys, _json, max_size=6), version=st.sampled_from([1, 2]))
def test_any_table_reads_as_a_meta(rows: dict[str, Any], version: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.session")
        create(path).close()
        put_meta(path, **rows)
        as_version(path, version)
        with Session.open(path) as session:
            assert isinstance(session.meta, SessionMeta)
            assert session.ranks == 2
