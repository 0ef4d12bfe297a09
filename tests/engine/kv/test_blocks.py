"""The block manager, held against a model of itself: no block is lost or held twice, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lockstep.engine.errors import RequestError
from lockstep.engine.kv.blocks import BlockManager


class Blocks(RuleBasedStateMachine):
    """`lengths` is what the sequences were last set to hold."""

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 5))
    def start(self, blocks: int, size: int) -> None:
        self.manager = BlockManager(blocks, size)
        self.lengths: dict[int, int] = {}

    @rule(wanted=st.dictionaries(st.integers(0, 3), st.integers(0, 30), min_size=1))
    def reserve(self, wanted: dict[int, int]) -> None:
        size = self.manager.block_size
        growth = sum(
            max(0, -(-length // size) - -(-self.lengths.get(seq, 0) // size))
            for seq, length in wanted.items()
        )
        before = {seq: list(table) for seq, table in self.manager.tables.items()}
        if growth > self.manager.free:
            with pytest.raises(RequestError, match="the KV cache is full"):
                self.manager.reserve(wanted)
            assert self.manager.tables == before
            return
        self.manager.reserve(wanted)
        for seq, length in wanted.items():
            self.lengths[seq] = max(length, self.lengths.get(seq, 0))
            assert self.manager.tables[seq][: len(before.get(seq, []))] == before.get(seq, [])

    @rule(seq=st.integers(0, 3), length=st.integers(0, 30))
    def truncate(self, seq: int, length: int) -> None:
        if seq in self.lengths:
            self.manager.truncate(seq, length)
            self.lengths[seq] = min(length, self.lengths[seq])

    @rule(seq=st.integers(0, 3))
    def release(self, seq: int) -> None:
        if seq in self.lengths:
            self.manager.release(seq)
            del self.lengths[seq]

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        size = self.manager.block_size
        assert {seq: len(table) for seq, table in self.manager.tables.items()} == {
            seq: -(-length // size) for seq, length in self.lengths.items()
        }
        assert self.manager.used + self.manager.free == self.manager.num_blocks


TestBlocks = Blocks.TestCase


def test_a_block_held_twice_is_noticed() -> None:
    manager = BlockManager(4, 2)
    manager.reserve({0: 3, 1: 2})
    manager.tables[1].append(manager.tables[0][0])
    with pytest.raises(AssertionError, match="block accounting is broken: 4 held, 1 free, 4 in all"):
        manager.check_integrity()
