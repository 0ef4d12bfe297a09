"""Lockstep's own engine with a bug in it, all ranks as threads of one process, recorded as one session.

The families that transformers' modules cannot easily be cut for (experts, latents, states) run here as users run them.
A bug replaces seams of `Rules` on one rank or on all, in all layers or in some, or changes loaded weights:

    def weights_doubled(p: Spoilt) -> None:
        p.rules((1,), choice_weights=lambda *args: 2 * routing.weights(*args))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.model import Decoder
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT, Rules, defaults
from lockstep.engine.run.loading import Loader
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.run.sequences import StepResult
from lockstep.engine.taps.hub import CapturePolicy
from lockstep.engine.taps.names import local_name
from lockstep.sessions import SequenceStep, SessionWriter, StepRecord, TensorRecord
from lockstep.sessions.meta import CaptureMeta, ConfigMeta, ModelMeta, SequenceMeta, SessionMeta
from lockstep.workbench.inferior.step_record import taps_of
from lockstep.workbench.references.arrays import array, dtype_name
from lockstep.workbench.references.request import GoldenRequest
from tests.workbench.diagnosis.bugs.sharded import Ring

Layers = Iterable[int] | None
#: Engine-wide rules that are correct and not `CORRECT`: taps then keep copies, as they do under a fault.
_OBSERVED = replace(CORRECT, embedding=lambda rows, model: defaults.looked_up(rows, model))


class RingComm(Comm):
    """The collectives of one thread among `ring.size`."""

    def __init__(self, rank: int, ring: Ring) -> None:
        super().__init__(rank, ring.size)
        self.ring = ring

    @property
    def backend(self) -> str:
        return "gloo" if self.size > 1 else "none"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else x.copy_(self.ring.sum(self.rank, x.clone()))

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor | None:
        if self.size == 1:
            return x
        parts = self.ring.gather(self.rank, x.clone())
        return torch.cat(parts, 1) if self.rank == 0 else None

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x if self.size == 1 else x.copy_(self.ring.gather(self.rank, x.clone())[source])

    def union(self, bits: int) -> int:
        for other in [] if self.size == 1 else self.ring.gather(self.rank, bits):
            bits |= other
        return bits


@dataclass(slots=True)
class Spoilt:
    """One rank of an engine while it is being spoilt, and what it is doing while it runs."""

    comm: RingComm
    model: ModelConfig
    config: EngineConfig
    seams: dict[str, Callable[..., Any]] = field(default_factory=dict)
    by_layer: dict[int, dict[str, Callable[..., Any]]] = field(default_factory=dict)
    changes: list[Callable[[Decoder], None]] = field(default_factory=list)
    begun: list[Callable[[Runner], None]] = field(default_factory=list)
    runner: Runner | None = None

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def tp(self) -> int:
        return self.comm.size

    @property
    def decode(self) -> bool:
        """Step 0 reads the prompts, every further one a token of each sequence."""
        return self.comm.step > 0

    @property
    def batch(self) -> Batch:
        assert self.runner is not None, "it runs"
        return self.runner.hub.batch

    def rules(self, which: Layers = None, **seams: Callable[..., Any]) -> None:
        """Other seams of `Rules`, in these layers alone or in all."""
        assert all(hasattr(CORRECT, name) for name in seams), seams
        if which is None:
            self.seams |= seams
        for layer in which or ():
            self.by_layer.setdefault(layer, {}).update(seams)

    def loaded(self, change: Callable[[Decoder], None]) -> None:
        """`change` what was loaded."""
        self.changes.append(change)

    def running(self, change: Callable[[Runner], None]) -> None:
        """`change` the runner before its first pass."""
        self.begun.append(change)

    def later(self, right: Callable[..., Any], wrong: Callable[..., Any]) -> Callable[..., Any]:
        """`right` for prompts, `wrong` in decode steps."""
        return lambda *args, **kwargs: (wrong if self.decode else right)(*args, **kwargs)

    def at(self, tap: str) -> bool:
        """Whether the rank has come to that tap of any layer."""
        assert self.runner is not None, "it runs"
        return local_name(self.runner.specs[self.comm.place].name) == tap

    def rows(self, seq: int) -> slice:
        """A sequence's rows of the packed batch."""
        span = self.batch.spans[seq]
        return slice(span.start, span.stop)

    def start(self, path: Path) -> Runner:
        """Load the checkpoint with all that was changed."""
        loader = Loader(path, self.config, self.comm)

        def load(decoder: Decoder, rules: Rules) -> Any:
            found = loader(decoder, rules)
            with torch.inference_mode():
                for change in self.changes:
                    change(decoder)
            if self.by_layer:
                self._bind_by_layer(decoder)
            return found

        rules = replace(_OBSERVED, **self.seams)
        self.runner = Runner(loader.model, self.config, self.comm, rules, load)
        specs = range(len(self.runner.specs))
        self.runner.watch(CapturePolicy(True, dict.fromkeys(specs, "full")))
        for begin in self.begun:
            begin(self.runner)
        return self.runner

    def _bind_by_layer(self, decoder: Decoder) -> None:
        bind = decoder.bind

        def bound(rules: Rules, taps: Any, places: Mapping[str, int]) -> None:
            bind(rules, taps, places)
            for i, seams in self.by_layer.items():
                decoder.layers[i].bind(Wiring(replace(rules, **seams), taps, places).layer(i))

        decoder.bind = bound  # type: ignore[method-assign]


def record_engine(
    patch: Callable[[Spoilt], None], request: GoldenRequest, path: Path, *, tp: int, ep: int
) -> None:
    """Record an engine of `tp` ranks with the patch in it, teacher-forced on the request's sequences."""
    ring, checkpoint = Ring(tp), Path(request.model)
    config = EngineConfig(tp=tp, ep=ep, dtype=request.dtype, threads=1, max_tokens=64)
    runners = []
    for rank in range(tp):
        comm = RingComm(rank, ring)
        spoilt = Spoilt(comm, Loader(checkpoint, config, comm).model, config)
        patch(spoilt)
        runners.append(spoilt.start(checkpoint))
    for runner in runners:
        for seq, plan in enumerate(request.sequences):
            runner.add(seq, list(plan.prompt), Sampling())
    meta = SessionMeta(
        source="lockstep run",
        model=ModelMeta(name=checkpoint.name, path=str(checkpoint), num_layers=runners[0].model.num_layers),
        config=ConfigMeta(tp=tp, device="cpu", dtype=request.dtype),
        capture=CaptureMeta(full=("*",)),
        sequences={
            seq: SequenceMeta(prompt_ids=plan.prompt, forced=plan.forced)
            for seq, plan in enumerate(request.sequences)
        },
    )
    taps = taps_of(runners[0].specs)
    with (
        SessionWriter.create(path, taps=taps, ranks=tp, meta=meta) as writer,
        ThreadPoolExecutor(tp) as pool,
    ):
        for step in range(request.steps + 1):
            forced = {seq: plan.forced[step] for seq, plan in enumerate(request.sequences) if plan.forced}
            passes = [pool.submit(_step, runner, forced) for runner in runners]
            writer.step(0, _record(step, [one.result() for one in passes], runners[0]))


def _step(runner: Runner, forced: Mapping[int, int]) -> StepResult:
    try:
        return runner.step(forced)
    except BaseException:
        assert isinstance(runner.comm, RingComm)
        runner.comm.ring.abort()
        raise


def _record(step: int, results: list[StepResult], runner: Runner) -> StepRecord:
    tensors = [
        TensorRecord(runner.specs[one.tap].name, rank, one.seq, array(one.tensor), dtype_name(one.tensor))
        for rank, result in enumerate(results)
        for one in result.captured
    ]
    sequences = [
        SequenceStep(
            one.seq,
            one.ids,
            one.positions,
            [result.sequences[i].held for result in results],
            emitted=one.emitted,
            forced=one.forced,
        )
        for i, one in enumerate(results[0].sequences)
    ]
    return StepRecord(
        step,
        "decode" if step else "prefill",
        sequences,
        0.0,
        stats=np.stack([result.stats for result in results if result.stats is not None], 1),
        checksums=np.stack([result.checksums for result in results if result.checksums is not None], 1),
        tensors=tensors,
    )
