"""What the model is: its configuration, and the checkpoint's weights as an engine of a given dtype holds them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import DTYPES, DType, ModelConfig
from lockstep.engine.graph.formula import in_chunks, rows_at_once
from lockstep.engine.graph.index_choice import as_seen
from lockstep.engine.parallel.shards import held_in
from lockstep.engine.taps.names import local_name, operation_at
from lockstep.sessions.dtypes import rounded as rounded
from lockstep.workbench.diagnosis.operations.weights import (
    CheckpointWeights,
    StoredMatrix,
    checkpoint_misreadings,
)
from lockstep.workbench.diagnosis.recording import Array

#: Bytes of weights that are kept: those of an operation, which all its ranks and hypotheses read. More costs pages that
#: the kernel has to clear first, which takes longer than reading a weight again.
KEPT_BYTES = 1 << 28

#: Half the distance of neighbouring numbers, relative: the most that one rounding errs by.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: The largest finite number; and what an engine may take for zero: in the wide formats what is below the least normal
#: number, in float16 the last of its subnormal ones, which kernels keep.
LARGEST = {"float64": 1.797e308, "float32": 3.4028235e38, "bfloat16": 3.3895314e38, "float16": 65504.0}
SMALLEST = {"float64": 2.3e-308, "float32": 1.2e-38, "bfloat16": 1.2e-38, "float16": 2.0**-24}

#: Dtypes in which engines round what they compute in float32.
SIXTEEN_BITS = ("bfloat16", "float16")
#: What is float32 whatever the model's dtype.
_WIDE = ("attn.q_l2", "attn.k_l2", "attn.state", "attn.index_scores")
#: Operations that need nothing of the model: they can be judged without its checkpoint.
MODEL_FREE = ("softmax", "context", "residual", "activation")
_NO_MODEL = ModelConfig(
    family="llama", hidden_size=0, intermediate_size=0, num_layers=0, num_heads=0, num_kv_heads=0, head_dim=0,
    vocab_size=0, max_position=0, rms_eps=0.0, rope_theta=0.0,
)  # fmt: skip


class Facts:
    """A model in an engine of `dtype` (torch's name of it). Weights are read when they are asked for, and kept as far
    as KEPT_BYTES allows. `model_free`: there is no checkpoint, so that MODEL_FREE operations alone can be judged."""

    model_free = False

    def __init__(
        self,
        model: ModelConfig,
        dtype: str,
        read: Callable[[str], NDArray[Any] | None],
        misread: Callable[[str], Any] = lambda name: (),
        stored_matrix: Callable[[str, str], StoredMatrix | None] = lambda name, held: None,
    ) -> None:
        self.model, self.dtype, self._read, self.misread = model, dtype, read, misread
        self._stored_matrix = stored_matrix
        self.whole = model  # whatever layer `model` is of
        self.stored = dtype  # that weights are held in, whatever an operation computes in
        self._kept: OrderedDict[str, NDArray[Any] | None] = OrderedDict()

    @classmethod
    def of(cls, checkpoint: Path, dtype: str) -> Facts:
        """Of a checkpoint directory or a GGUF file. CheckpointError and ConfigError as `open_checkpoint`."""
        model, source = open_checkpoint(checkpoint)
        source.close()
        weights = CheckpointWeights(checkpoint)
        return cls(model, dtype, weights, checkpoint_misreadings(checkpoint), weights.matrix)

    @classmethod
    def without_checkpoint(cls, layers: int, dtype: str) -> Facts:
        """Of a model of which only its number of layers is known."""
        found = cls(replace(_NO_MODEL, num_layers=layers), dtype, lambda name: None)
        found.model_free = True
        return found

    def of_layer(self, layer: int | None) -> Facts:
        """The same with the model as that layer has it; None: outside of the layers."""
        model = self.model.of_layer(layer)
        if model is self.model:
            return self
        found = copy(self)
        found.model = model
        return found

    def at(self, dtype: str) -> Facts:
        """The same in an engine of another dtype."""
        found = Facts(self.model, dtype, self._read, self.misread, self._stored_matrix)
        found.whole = self.whole
        found.model_free = self.model_free
        return found

    def of_tap(self, tap: str) -> Facts:
        """The same with the model as that tap's operation has it, at float32 where it keeps that whatever the model's
        dtype."""
        found, declared = copy(self), operation_at(tap)
        found.model = as_seen(declared, self.model)
        return found._wide(tap)

    def _wide(self, tap: str) -> Facts:
        experts, kind = self.model.experts, local_name(tap)
        if UNIT[self.dtype] <= UNIT["float32"]:
            return self
        wide = kind in _WIDE or (
            experts is not None
            and (
                (experts.wide and kind == "mlp.router")
                or (experts.wide_weights and kind == "mlp.topk_weights")
            )
        )
        if not wide:
            return self
        found = copy(self)
        found.dtype = "float32"
        return found

    def norm_weight(self, weight: Array) -> Array:
        """What is multiplied by a norm's weight as the checkpoint has it."""
        return 1 + weight if self.model.norms_add_one else weight

    @property
    def unit(self) -> float:
        """The most that one rounding of a result errs by, relative."""
        return UNIT[self.dtype]

    @property
    def sum_unit(self) -> float:
        """The same inside of sums, which 16-bit engines add up in float32."""
        return min(self.unit, UNIT["float32"])

    def weight(self, name: str) -> NDArray[Any] | None:
        """The weight as the engine holds it: rounded to its dtype. In float32 (float64 of a float64 engine)."""
        if name not in self._kept:
            found = self._read(name)
            self._kept[name] = None if found is None else rounded(found, self._held_in(name))
            while len(self._kept) > 1 and sum(_nbytes(x) for x in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name]

    def rows(self, name: str, ids: Sequence[int]) -> NDArray[Any] | None:
        """Some rows of a weight, of which the rest is not read where that can be. IndexError where it has fewer."""
        found = self.matrix(name)
        if found is None:
            return None
        return found.rows(ids) if isinstance(found, StoredMatrix) else found[list(ids)]

    def matrix(self, name: str) -> NDArray[Any] | StoredMatrix | None:
        """The weight, not read yet where it lies in a file as it is used and is not kept: who judges a product reads it
        once, and the head of a large vocabulary is larger than all else."""
        found = None if name in self._kept else self._stored_matrix(name, self._held_in(name))
        return self.weight(name) if found is None else found

    def _held_in(self, name: str) -> str:
        narrow: DType | None = next((one for one in DTYPES if one == self.stored), None)
        return self.stored if narrow is None else held_in(name, self.model, narrow)

    def vector(self, name: str) -> Array | None:
        """A norm's weight or a bias, in float64."""
        found = self.weight(name)
        return None if found is None else found.astype(np.float64)


def on_grid(x: Array, dtype: str) -> bool:
    """Whether all that is finite is a number of the dtype, and something is."""
    held = rounded(x, dtype).astype(np.float64)
    return bool(x.size) and bool(((held == x) | ~np.isfinite(x)).all()) and bool(np.isfinite(x).any())


def _nbytes(array: NDArray[Any] | None) -> int:
    return 0 if array is None else array.nbytes


def spread(x: Array, weight: NDArray[Any]) -> Array:
    """The root of the sum of squares of a product's terms, [N, out]: what its rounding is measured by. Coarse:
    in float32. Rows that are not finite are NaN."""
    largest = np.abs(x).max(axis=1, keepdims=True, initial=0.0)
    largest[largest == 0] = 1.0
    with np.errstate(invalid="ignore"):
        square = np.square(x / largest, dtype=np.float64).astype(np.float32)
    parts = [square @ np.square(some, dtype=np.float32).T for some in in_chunks(weight)]
    return np.asarray(np.sqrt(np.concatenate(parts, axis=1).astype(np.float64)) * largest)


def chunks_of(weight: NDArray[Any] | StoredMatrix) -> Iterator[NDArray[Any]]:
    """Its rows, as many at a time as are widened at once."""
    return (
        weight.chunks(rows_at_once(weight.shape[1]))
        if isinstance(weight, StoredMatrix)
        else in_chunks(weight)
    )
