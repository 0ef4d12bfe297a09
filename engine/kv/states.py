"""The states of linear attention: what a sequence's layers carry from pass to pass, and what they carried before.

A state does not grow with the sequence, and nothing of an earlier one can be read off a later one: to go back, those of
earlier passes are kept, as many as fit into `kept_bytes`, all of the newest and ever fewer of the older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lockstep.engine.batch import SequenceSpan
from lockstep.engine.kv.sizing import KEPT_STATE_BYTES


@dataclass(frozen=True, slots=True)
class LayerState:
    """Of one layer: the newest rows that went into its convolution [conv - 1, channels], and each head's state
    [heads, key_dim, value_dim], in float32."""

    rows: Tensor
    heads: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.heads.nbytes


_Layers = dict[int, LayerState]


class StatePool:
    """States by sequence, by the tokens that it had read by then, and by layer. `fresh` are those of a sequence that
    has read nothing. A pass puts new ones beside the old; `commit` makes them the sequence's."""

    def __init__(
        self,
        fresh: Mapping[int, LayerState],
        last: Mapping[int, LayerState] | None = None,
        kept_bytes: int = KEPT_STATE_BYTES,
    ) -> None:
        self.fresh, self.kept_bytes = fresh, kept_bytes
        self.last: _Layers = dict(last or {})  # what was written last, whoever's it was
        self._held: dict[int, dict[int, _Layers]] = {}
        self._new: dict[int, _Layers] = {}

    def of(self, seq: int, layer: int) -> LayerState | None:
        """The state that the sequence's next token meets; None where it has read none."""
        held = self._held.get(seq)
        return held[max(held)][layer] if held else None

    def write(self, layer: int, span: SequenceSpan, state: LayerState) -> None:
        """The state after a pass, which reaches to the end of its tokens."""
        self._new.setdefault(span.seq, {})[layer] = self.last[layer] = state
        span.held[layer] = max(span.held[layer], span.end)

    def commit(self, seq: int, computed: int) -> None:
        """The pass is over, after which the sequence has read `computed` tokens."""
        if (new := self._new.pop(seq, None)) is not None:
            self._held.setdefault(seq, {})[computed] = new
            self._thin()

    def abandon(self) -> None:
        """The pass was broken off."""
        self._new.clear()

    def rewind(self, seq: int, computed: int) -> int:
        """Forget what came after `computed` tokens; returns how many the newest state that is left has read."""
        held = self._held.get(seq, {})
        for later in [at for at in held if at > computed]:
            del held[later]
        return max(held, default=0)

    def remove(self, seq: int) -> None:
        """The sequence is done."""
        self._held.pop(seq, None)

    def _thin(self) -> None:
        """Let go of every other state but the newest of the sequence that has most, until the rest fits."""
        size = sum(state.nbytes for state in self.fresh.values())
        while size * sum(len(held) - 1 for held in self._held.values()) > self.kept_bytes:
            held = max(self._held.values(), key=len)
            for at in sorted(held)[-2::-2]:
                del held[at]
