"""Decode steps as CUDA graphs: launched at once, and not kernel by kernel.

A step of one token a sequence launches hundreds of kernels of a few microseconds each, which takes the host longer
than the GPU. Where nothing that the host does depends on numbers, the step is captured with room for `most` keys, and
replayed with the ids, positions, lengths and blocks of each later one. What taps measure is a graph of its own behind
it: the host chooses tokens while the GPU still measures. Steps with a fault, a patch, a pause or a tensor to capture
run kernel by kernel: with `engine.layers.decode_attention` both have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.batch import Batch, DecodeInputs, SequenceSpan
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.model import Decoder
from lockstep.engine.run.sampler import summary
from lockstep.engine.taps.hub import TapHub
from lockstep.engine.taps.ledger import Recorded
from lockstep.engine.taps.one_pass import CapturedTables

#: Steps in a row that run kernel by kernel before one is captured, which takes as long as some of them.
WARM_UP = 3
#: Graphs that are kept, each with the memory of a step's activations.
KEPT = 4
#: Keys that the shortest graph has room for; then twice as many, and so on.
_LEAST = 256


@dataclass(frozen=True, slots=True)
class NewToken:
    """What a step reads of one sequence: a token at a position, and the blocks that hold it and all before it."""

    seq: int
    id: int
    position: int
    blocks: list[int]
    length: int  # of the sequence
    held: list[int]


@dataclass(frozen=True, slots=True)
class _Key:
    count: int
    most: int
    statistics: bool


class Fetched:
    """A tensor that a graph writes, on its way to the host: what the GPU is given later is not waited for."""

    def __init__(self, x: Tensor) -> None:
        """Room for x, which is fetched again and again."""
        self._x, self._host = x, torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._there = torch.cuda.Event()

    def ask(self) -> None:
        """Have it copied when the GPU comes to it."""
        self._host.copy_(self._x, non_blocking=True)
        self._there.record()

    def wait(self) -> NDArray[Any]:
        """As it was copied last; a later `ask` writes over it."""
        self._there.synchronize()
        found: NDArray[Any] = self._host.numpy()
        return found


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    measuring: torch.cuda.CUDAGraph | None  # what is measured of the step, behind it
    inputs: Tensor  # int32, what the graph reads
    batch: Batch  # the same as the layers have it; of the spans, those of the step that was captured
    logits: Tensor  # [S, V], what it writes
    summary: Fetched  # of each row of logits: `sampler.summary`
    written: frozenset[int]  # the layers whose rows of the cache it writes
    recorded: Recorded | None
    measured: Fetched | None  # what is `recorded`

    def replay(self) -> None:
        """Give the GPU the step, and what is measured of it."""
        self.graph.replay()
        self.summary.ask()
        if self.measuring is not None and self.measured is not None:
            self.measuring.replay()
            self.measured.ask()


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that has been replayed: the batch, this rank's logits [S, V], what is reported of each row to choose a
    token by, and what of its taps has been measured. The GPU may not be done with it."""

    batch: Batch
    logits: Tensor
    summary: Fetched
    recorded: Recorded | None
    measured: Fetched | None


class DecodeGraphs:
    """The captured steps of one decoder and one pool."""

    def __init__(self, decoder: Decoder, pool: KVPool, hub: TapHub, page: int, context: int) -> None:
        self._decoder, self._pool, self._hub = decoder, pool, hub
        self._page, self._context = page, context
        self._graphs: dict[_Key, _Graph] = {}
        self._streak = 0
        self.refused: str | None = None  # why a step could not be captured, though nothing spoke against it

    def wait(self) -> None:
        """A step that could not be replayed has run: the count begins anew."""
        self._streak = 0

    def ready(self) -> bool:
        """Whether enough steps in a row could have been replayed that one is worth it, and this GPU can."""
        self._streak += 1
        return self._streak > WARM_UP and self.refused is None and self._decoder.unrepeatable is None

    @torch.inference_mode()
    def replay_newest(self) -> None:
        """What was captured last, on the inputs that it had last."""
        next(reversed(self._graphs.values())).replay()

    def run(self, tokens: Many[NewToken]) -> Replayed | None:
        """One step. None where it cannot be captured: a layer waits for the GPU, or there is no memory for a second set
        of activations."""
        most = self._room(max(token.position for token in tokens) + 1)
        key = _Key(len(tokens), most, self._hub.policy.statistics)
        spans = [_span(i, token) for i, token in enumerate(tokens)]
        packed = self._packed(tokens, most)
        one = self._graphs.get(key)
        if one is None:
            try:
                one = self._capture(key, spans, packed)
            except RuntimeError as error:
                self.refused = str(error).partition("\n")[0]
                return None
        one.inputs.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        one.replay()
        for span in spans:
            for layer in one.written:
                span.held[layer] = max(span.held[layer], span.end)
        return Replayed(replace(one.batch, spans=spans), one.logits, one.summary, one.recorded, one.measured)

    def _room(self, keys: int) -> int:
        """Keys that a graph for so many has room for."""
        most = max(_LEAST, 1 << (keys - 1).bit_length())
        return min(most, -(-self._context // self._page) * self._page)

    def _packed(self, tokens: Many[NewToken], most: int) -> NDArray[np.int32]:
        """Ids, positions, slots, lengths, and the table of blocks."""
        page, blocks = self._page, -(-most // self._page)
        table = np.zeros((len(tokens), blocks), np.int32)
        for row, token in zip(table, tokens, strict=True):
            row[: len(token.blocks)] = token.blocks
        positions = np.array([token.position for token in tokens], np.int32)
        slots = table[np.arange(len(tokens)), positions // page] * page + positions % page
        ids = np.array([token.id for token in tokens], np.int32)
        return np.concatenate((ids, positions, slots, positions + 1, table.ravel()), dtype=np.int32)

    def _batch(self, key: _Key, inputs: Tensor, spans: list[SequenceSpan]) -> Batch:
        count = key.count
        ids, positions, slots, lens = inputs[: 4 * count].view(4, count)
        lengths = DecodeInputs(lens, inputs[4 * count :].view(count, -1), self._page, key.most)
        caches = frozenset(self._pool.layers)
        last = torch.arange(count, device=inputs.device)
        return Batch(ids.long(), positions.long(), slots.long(), last, spans, caches, lengths)

    def _capture(self, key: _Key, spans: list[SequenceSpan], packed: NDArray[np.int32]) -> _Graph:
        """Run the step once, so that whatever is made at first use is there, and capture it. What it writes to the
        cache is what the replay will write there."""
        while len(self._graphs) >= KEPT:
            self._graphs.pop(next(iter(self._graphs)))
        hub, ledger = self._hub, self._hub.ledger
        inputs = torch.from_numpy(packed).to(self._decoder.device)
        held = [_unheld(span) for span in spans]
        tables, graph, measuring = CapturedTables(), torch.cuda.CUDAGraph(), None
        recorded: Recorded | None = None
        try:
            hub.begin(self._batch(key, inputs, held))
            ledger.begin_capture(tables)
            summary(self._decoder.forward(hub.batch, self._pool))
            ledger.close()
            torch.cuda.synchronize()
            tables.begin()
            ledger.begin_capture(tables)
            with torch.cuda.graph(graph):
                batch = self._batch(key, inputs, held)
                logits = self._decoder.forward(batch, self._pool)
                found = summary(logits)
            if key.statistics:  # of the step's own memory, which it has to itself until it is replayed again
                measuring = torch.cuda.CUDAGraph()
                with torch.cuda.graph(measuring, pool=graph.pool()):
                    recorded = ledger.end_capture(tables)
        finally:
            hub.abandon()
        tables.fill()
        written = frozenset(layer for layer, rows in enumerate(held[0].held) if rows)
        measured = None if recorded is None else Fetched(recorded.measured)
        self._graphs[key] = one = _Graph(
            graph, measuring, inputs, batch, logits, Fetched(found), written, recorded, measured
        )
        return one


#: What a span of a captured step has in place of slots: the graph has its own.
_NOWHERE = torch.empty(0, dtype=torch.int64)


def _span(index: int, token: NewToken) -> SequenceSpan:
    """Its tensors are the host's."""
    keys = token.position + 1
    return SequenceSpan(
        token.seq,
        index,
        index + 1,
        keys,
        _NOWHERE,
        torch.tensor([token.position]),
        _NOWHERE,
        keys,
        token.length,
        list(token.held),
        True,
    )


def _unheld(span: SequenceSpan) -> SequenceSpan:
    return replace(span, held=[0] * len(span.held))
