"""Any record that a session may hold, for hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.sessions import STATISTICS, SequenceStep, StepRecord, TensorRecord
from lockstep.sessions.dtypes import STORED_AS
from tests.sessions.samples import TAPS

_INT64 = st.integers(-(2**63), 2**63 - 1)
# SQLite keeps -0.0 in a REAL column as 0.0: the sign of zero is not part of what is recorded.
_FLOAT = st.floats(allow_nan=True, allow_infinity=True).map(lambda x: x + 0.0)


def _lengths(layers: int, ranks: int = 2) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """Cached lengths [ranks][layers]; no layers: not known."""
    of_rank = st.lists(_INT64, min_size=layers, max_size=layers).map(tuple)
    return st.tuples(*[of_rank] * ranks) if layers else st.just(())


def sequences() -> st.SearchStrategy[SequenceStep]:
    ints = st.lists(_INT64, max_size=6).map(tuple)
    return st.builds(
        SequenceStep,
        seq=st.integers(0, 1000),
        ids=ints,
        positions=ints,
        kv_lens=st.integers(0, 3).flatmap(_lengths),
        block_table=ints,
        emitted=st.none() | _INT64,
        forced=st.booleans(),
        topk_ids=ints,
        topk_logits=st.lists(_FLOAT, max_size=6).map(tuple),
        logsumexp=st.none() | _FLOAT,
        entropy=st.none() | _FLOAT,
    )


@st.composite
def tensors(draw: st.DrawFn, ranks: int = 2) -> list[TensorRecord]:
    """A few tensors of any stored dtype and shape, at distinct places."""
    places = draw(
        st.lists(
            st.tuples(
                st.sampled_from([tap.name for tap in TAPS]),
                st.integers(0, ranks - 1),
                st.integers(0, 3),
                st.sampled_from(["", "-1:", ":,{0;2}"]),
            ),
            max_size=4,
            unique=True,
        )
    )
    found = []
    for tap, rank, seq, part in places:
        dtype = draw(st.sampled_from(sorted(STORED_AS)))
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
        found.append(TensorRecord(tap, rank, seq, draw(hnp.arrays(STORED_AS[dtype], shape)), dtype, part))
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[StepRecord]:
    """Steps 0, 1, 2, … as an engine might record them, each with or without arrays and tensors."""
    found = []
    for step in range(draw(st.integers(1, 5))):
        stats = hnp.arrays(np.float32, (len(TAPS), 2, len(STATISTICS)))
        checksums = hnp.arrays(np.uint64, (len(TAPS), 2))
        found.append(
            StepRecord(
                step=step,
                phase=draw(st.sampled_from(["prefill", "decode"])),
                sequences=tuple(draw(st.lists(sequences(), max_size=3, unique_by=lambda s: s.seq))),
                wall_seconds=draw(st.floats(0, 1e6).map(lambda x: x + 0.0)),
                stats=draw(st.none() | stats),
                checksums=draw(st.none() | checksums),
                tensors=draw(tensors()),
                free_blocks=draw(st.none() | st.integers(0, 10**9)),
                used_blocks=draw(st.none() | st.integers(0, 10**9)),
                dropped=tuple(draw(st.lists(st.text(), max_size=2))),
            )
        )
    return found
