"""The runner of one rank: sequences, cache and taps around a decoder, one forward pass at a time.

Every rank runs the same runner on the same requests and so computes the same schedule without communication;
only tokens are chosen by rank 0 and broadcast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import Batch, DecodeInputs, SequenceSpan
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RequestError
from lockstep.engine.kv.blocks import BlockManager
from lockstep.engine.kv.pool import KVPool, RowShape
from lockstep.engine.kv.sizing import context_length, pool_blocks
from lockstep.engine.kv.states import LayerState, StatePool
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT, Rules
from lockstep.engine.run.graphs import DecodeGraphs, NewToken
from lockstep.engine.run.prompts import check_ids, check_prompt
from lockstep.engine.run.results import SequenceResult, TokenChoice
from lockstep.engine.run.sampler import Draw, choose_by, choose_each
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.run.sequences import Sequence, StepResult
from lockstep.engine.taps.hub import CapturePolicy, TapHub
from lockstep.engine.taps.names import model_taps

#: A token, and what it was chosen from.
_Chosen = tuple[int, TokenChoice | None]


class Runner:
    """Runs passes on one rank. `load(decoder)` fills the decoder's parameters."""

    graphs: DecodeGraphs

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        comm: Comm,
        rules: Rules,
        load: Callable[[Decoder, Rules], Any],
    ) -> None:
        self.model, self.config, self.comm = model, config, comm
        self._load = load
        self.specs = model_taps(model, config.tp, config.ep)
        self.hub = TapHub(model, self.specs, comm)
        self.context = context_length(model, config)
        self._widths = [shards.vocab(model.vocab_size, config.tp, r).size for r in range(config.tp)]
        self._build(rules)
        self._clear(rules)

    def rebuild(self, rules: Rules) -> None:
        """Load the weights anew under `rules` and start with an empty cache."""
        del (
            self.graphs,
            self.decoder,
            self.pool,
        )  # gone before the new ones come: a rank may have no room for both
        self._build(rules)
        self._clear(rules)

    def reload(self, rules: Rules) -> None:
        """Load the weights anew under `rules`; sequences and cache stay as they are."""
        del self.graphs, self.decoder
        self._build(rules)
        self.rules = rules
        self.rebind()

    def reset(self, rules: Rules) -> None:
        """Forget all sequences and take `rules`; the weights stay, and what memory held stays in it."""
        left = self.pool.states.last
        del self.graphs, self.pool
        self._clear(rules, left)

    def _build(self, rules: Rules) -> None:
        self.decoder = Decoder(self.model, self.config, self.comm, rules)
        self.loaded = self._load(self.decoder, rules)

    def _clear(self, rules: Rules, left: Mapping[int, LayerState] | None = None) -> None:
        self.rules = rules
        self.sequences: dict[int, Sequence] = {}
        self.comm.step = 0
        blocks = pool_blocks(self.model, self.config)
        self.blocks = BlockManager(blocks, self.config.block_size)
        self.pool = KVPool(
            {layer: self._row_shape(layer, rules) for layer in shards.cached_layers(self.model)},
            blocks,
            self.config.block_size,
            self.decoder.dtype,
            self.decoder.device,
            self.context,
            math.nan if self.config.poison_cache else 0.0,
            StatePool(self.decoder.fresh_states(), left),
            {
                layer: rules.shared_cache(self.model, layer)
                for layer in range(self.model.num_layers)
                if self.model.of_layer(layer).kv_from is not None
            },
        )
        self.rebind()

    def _row_shape(self, layer: int, rules: Rules) -> RowShape:
        """What is cached of a token in a layer, under `rules`."""
        own = self.model.of_layer(layer)
        heads, widths = shards.cached(own, self.comm.size, self.comm.rank)
        if own.latent is None:
            group = own.num_heads // self.comm.size // heads
            heads = rules.cache_heads(torch.empty(1, heads, widths[0], device="meta"), group).shape[1]
        return RowShape(heads, widths)

    def rebind(self) -> None:
        """Bind layers to the rules in force and to the taps that are wanted now."""
        self.hub.ledger.copies = self.rules != CORRECT
        self.graphs = DecodeGraphs(self.decoder, self.pool, self.hub, self.config.block_size, self.context)
        self.decoder.bind(self.rules, self.hub.tap, self.hub.places)

    def watch(self, policy: CapturePolicy) -> None:
        """Set what is recorded of every step."""
        self.hub.policy = policy
        self.rebind()

    def add(self, seq: int, ids: list[int], sampling: Sampling) -> None:
        """A new sequence. RequestError when it is empty, too long, or has ids out of range."""
        if seq in self.sequences:
            raise RequestError(f"sequence {seq} is already there")
        check_prompt(ids, vocab_size=self.model.vocab_size, context=self.context)
        if len(self.sequences) >= self.config.max_sequences:
            raise RequestError(f"at most {self.config.max_sequences} sequences at a time")
        self.sequences[seq] = Sequence(seq, list(ids), sampling, [0] * self.model.num_layers, len(ids))

    def sequence(self, seq: int) -> Sequence:
        """The sequence of that number; RequestError when there is none."""
        if seq not in self.sequences:
            there = ", ".join(map(str, self.sequences)) or "none"
            raise RequestError(f"there is no sequence {seq}: there is {there}")
        return self.sequences[seq]

    def remove(self, seq: int) -> None:
        """A sequence is done: its blocks are free again."""
        del self.sequences[self.sequence(seq).id]
        self.pool.states.remove(seq)
        if seq in self.blocks.tables:
            self.blocks.release(seq)

    def draft(self, seq: int, ids: list[int]) -> None:
        """Tokens after those that a sequence has: its next pass reads them as well, as speculation does."""
        sequence = self.sequence(seq)
        check_ids(ids, self.model.vocab_size)
        if len(sequence.ids) + len(ids) > self.context:
            raise RequestError(f"sequence {seq} has no room for {len(ids)} more tokens in {self.context}")
        sequence.ids += ids

    def rewind(self, lengths: Mapping[int, tuple[int, int, int]], step: int) -> None:
        """Go back: keep `lengths[seq] = (ids, computed, kv_len)` of each sequence; the next pass is `step`.

        Rows past `kv_len` are erased: a fault that reads a slot before it was written must read what it
        read the first time.
        """
        for seq, (kept, computed, kv_len) in lengths.items():
            sequence = self.sequence(seq)
            possible = 0 < kept <= len(sequence.ids) and 0 <= computed <= min(kept, sequence.computed)
            if not possible or not 0 <= kv_len <= sequence.kv_len:
                raise RequestError(
                    f"cannot rewind sequence {seq} to {kept} ids, {computed} computed, {kv_len} cached: "
                    f"it has {len(sequence.ids)} ids, {sequence.computed} computed, {sequence.kv_len} cached"
                )
        for seq, (kept, computed, kv_len) in lengths.items():
            sequence = self.sequences[seq]
            if seq in self.blocks.tables:
                self.pool.erase(self.slots(seq, sequence.kv_len)[kv_len:])
                self.blocks.truncate(seq, kv_len)
            del sequence.ids[kept:]
            sequence.passes = [end for end in sequence.passes if end <= computed]
            sequence.computed, sequence.kv_len = computed, kv_len
            sequence.held = [min(rows, kv_len) for rows in sequence.held]
            self._restore_states(sequence)
        self.comm.step = step

    @torch.inference_mode()
    def _restore_states(self, sequence: Sequence) -> None:
        """The states of linear attention as they were after the tokens that are kept. Where they were let go of, or a
        pass was kept in part, what came since the last ones that are there is computed again, pass by pass, by this
        sequence alone and unseen."""
        computed, kv_len = sequence.computed, sequence.kv_len
        start = self.pool.states.rewind(sequence.id, computed)
        if not self.pool.states.fresh or start == computed:
            return
        self.decoder.bind(self.rules, lambda tap: None, self.hub.places)
        sequence.kv_len = sequence.computed = start
        if computed not in sequence.passes:
            sequence.passes.append(computed)
        for end in (end for end in sequence.passes if end > start):
            batch = self._batch({sequence.id: sequence.ids[sequence.computed : end]})
            self.decoder.forward(batch, self.pool)
            sequence.computed = sequence.kv_len = end
            self.pool.states.commit(sequence.id, end)
        sequence.kv_len = kv_len
        self.rebind()

    @torch.inference_mode()
    def step(self, forced: Mapping[int, int] | None = None) -> StepResult:
        """One forward pass of every sequence. `forced[seq]` is the token to go on with (teacher
        forcing); otherwise it is chosen. When it raises, no sequence has moved."""
        if not self.sequences:
            raise RequestError("there is no sequence to run: add one first")
        forced = {self.sequence(seq).id: token for seq, token in (forced or {}).items()}
        check_ids(list(forced.values()), self.model.vocab_size)
        started = time.perf_counter()
        plan = {seq.id: self._new_tokens(seq) for seq in self.sequences.values()}
        decoding = all(self.sequences[seq].decodes for seq in plan)
        try:
            replayed = self.graphs.run(self._new(plan)) if self._replays(plan) else None
            if replayed is not None:
                # While the host chooses and advances, the GPU measures: that is waited for last.
                found = replayed.summary.wait()
                choices = self._choose(plan, forced, lambda draws: choose_by(found, replayed.logits, draws))
                results = self._advance(plan, replayed.batch, choices, forced)
                measured = None if replayed.measured is None else replayed.measured.wait()
                stats, checksums, captured = self.hub.replayed(replayed.batch, replayed.recorded, measured)
            else:
                batch = self._batch(plan)
                self.hub.begin(batch)
                with self.decoder.reading(batch):
                    logits = self.decoder.forward(batch, self.pool)
                    chosen = self._chosen(plan, self.comm.gather_columns(logits, self._widths), forced)
                stats, checksums, captured = self.hub.end()
                results = self._advance(plan, batch, chosen, forced)
        except BaseException:
            self.hub.abandon()
            self.pool.states.abandon()
            for seq in reversed(plan):  # last given, first returned: the free list is as it was
                self.blocks.truncate(seq, self.sequences[seq].kv_len)
            raise
        self.comm.step += 1
        return StepResult(
            "decode" if decoding else "prefill",
            results,
            time.perf_counter() - started,
            self.blocks.free,
            self.blocks.used,
            stats,
            checksums,
            captured,
        )

    def _replays(self, plan: Mapping[int, list[int]]) -> bool:
        """Whether the step is one of those that are captured: each sequence reads one token behind all that it has,
        nothing is wrong on purpose, and taps at most measure."""
        if self.decoder.device.type != "cuda":
            return False
        plain = self.rules == CORRECT and self.hub.measures_alone and not self.pool.states.fresh
        if plain and all(map(self._goes_on, plan, plan.values())):
            return self.graphs.ready()
        self.graphs.wait()
        return False

    def _goes_on(self, seq: int, ids: list[int]) -> bool:
        """Whether a sequence reads one token behind all that is cached of it."""
        sequence = self.sequences[seq]
        return len(ids) == 1 and sequence.kv_len == sequence.computed > 0

    def _new(self, plan: Mapping[int, list[int]]) -> list[NewToken]:
        """What a captured step is given; reserves the blocks it needs."""
        wanted = {seq: self.sequences[seq].kv_len + 1 for seq in plan}
        self._check_context(wanted)
        self.blocks.reserve(wanted)
        return [
            NewToken(seq, token, at.kv_len, self.blocks.tables[seq], len(at.ids), at.held)
            for seq, (token,) in plan.items()
            if (at := self.sequences[seq])
        ]

    @torch.inference_mode()
    def lens(self, rows: Tensor, top: int) -> list[TokenChoice]:
        """Rank 0: what each residual row [L, H] would choose if the final norm and the head came next; the
        others take part in the collective and return nothing."""
        rows = rows.to(self.decoder.device, self.decoder.dtype)
        logits = self.comm.gather_columns(self.decoder.lens(rows), self._widths)
        return [] if logits is None else choose_each(logits, [Draw(Sampling(), 0, 0)] * len(logits), top)

    def _new_tokens(self, sequence: Sequence) -> list[int]:
        chunk = self.config.chunk_tokens or len(sequence.ids)
        return sequence.ids[sequence.computed : sequence.computed + chunk]

    def _batch(self, plan: dict[int, list[int]]) -> Batch:
        """Positions, slots and spans of the tokens to run; reserves the blocks they need."""
        wanted, positions = {}, {}
        for seq, ids in plan.items():
            sequence = self.sequences[seq]
            positions[seq] = list(self.rules.positions(sequence.computed, len(ids)))
            wanted[seq] = max(sequence.kv_len, positions[seq][-1] + 1)
            self._check_context({seq: max(wanted[seq], sequence.computed + len(ids))})
        self.blocks.reserve(wanted)
        spans, ids_all, slots_all, start = [], [], [], 0
        for seq, ids in plan.items():
            rows = self.slots(seq, wanted[seq])
            q = self._tensor(positions[seq])
            slots_all.append(rows[q])
            ids_all += ids
            spans.append(
                SequenceSpan(
                    seq,
                    start,
                    start + len(ids),
                    wanted[seq],
                    rows,
                    q,
                    torch.arange(wanted[seq], device=self.decoder.device),
                    max(positions[seq]) + 1,
                    len(self.sequences[seq].ids),
                    list(
                        self.sequences[seq].held
                    ),  # a pass that is broken off leaves the sequence's own alone
                    positions[seq] == list(range(wanted[seq] - len(ids), wanted[seq])),
                )
            )
            start += len(ids)
        packed = torch.cat([span.q_positions for span in spans])
        last = self._tensor([span.stop - 1 for span in spans])
        caches = frozenset(map(self.rules.cache_layer, range(self.model.num_layers)))
        lengths = None
        if self.decoder.device.type == "cuda" and all(
            span.stop - span.start == 1 and span.in_order for span in spans
        ):
            lengths = DecodeInputs.of(spans, self.config.block_size, self.decoder.device)
        return Batch(self._tensor(ids_all), packed, torch.cat(slots_all), last, spans, caches, lengths)

    def _check_context(self, wanted: Mapping[int, int]) -> None:
        for seq, length in wanted.items():
            if length > self.context:
                raise RequestError(
                    f"sequence {seq} has reached the end of its context ({self.context} tokens)"
                )

    def slots(self, seq: int, length: int) -> Tensor:
        """Pool slots of positions 0 … length - 1 of a sequence, [length]."""
        size = self.config.block_size
        table = self._tensor(self.blocks.tables.get(seq, []))
        slots = table[:, None] * size + torch.arange(size, device=self.decoder.device)
        return slots.flatten()[:length]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.decoder.device)

    def _advance(
        self, plan: dict[int, list[int]], batch: Batch, chosen: list[_Chosen], forced: dict[int, int]
    ) -> list[SequenceResult]:
        """Every sequence goes on with the token that was chosen for it."""
        results = []
        for span, (token, choice) in zip(batch.spans, chosen, strict=True):
            sequence, ids = self.sequences[span.seq], plan[span.seq]
            sequence.computed += len(ids)
            self.pool.states.commit(span.seq, sequence.computed)
            sequence.kv_len, sequence.held = span.kv_len, span.held
            sequence.passes.append(sequence.computed)
            emits = sequence.computed == len(sequence.ids)
            if emits:
                sequence.ids.append(token)
            results.append(
                SequenceResult(
                    span.seq,
                    ids,
                    span.q_positions.tolist(),
                    sequence.kv_len,
                    sequence.computed,
                    sequence.held,
                    list(self.blocks.tables[span.seq]),
                    token if emits else None,
                    emits and span.seq in forced,
                    choice,
                )
            )
        return results

    def _chosen(
        self, plan: dict[int, list[int]], logits: Tensor | None, forced: dict[int, int]
    ) -> list[_Chosen]:
        """The tokens to go on with, chosen on rank 0 and broadcast; rank 0's with what they were chosen from."""
        chosen: list[_Chosen] = [(0, None)] * len(plan)
        if logits is not None:
            chosen = self._choose(plan, forced, partial(choose_each, logits))
        if self.comm.size == 1:
            return chosen
        tokens = self.comm.broadcast(self._tensor([token for token, _ in chosen])).tolist()
        return [(token, choice) for token, (_, choice) in zip(tokens, chosen, strict=True)]

    def _choose(
        self,
        plan: dict[int, list[int]],
        forced: dict[int, int],
        choose: Callable[[list[Draw]], list[TokenChoice]],
    ) -> list[_Chosen]:
        draws = []
        for seq, ids in plan.items():
            sequence = self.sequences[seq]
            draws.append(Draw(sequence.sampling, seq, sequence.computed + len(ids)))
        return [(forced.get(seq, one.token), one) for seq, one in zip(plan, choose(draws), strict=True)]
