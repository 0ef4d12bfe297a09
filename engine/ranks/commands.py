"""Carrying out a host's commands on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, assert_never

from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.errors import EngineError, RequestError
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.parallel.operations import OpKind
from lockstep.engine.peaks import held_on
from lockstep.engine.ranks import messages as m
from lockstep.engine.ranks import reports as r
from lockstep.engine.ranks.wire import Connection, Disconnected, WireArray
from lockstep.engine.ranks.wire_tensors import dtype_name, from_wire, to_wire
from lockstep.engine.rules import Rules
from lockstep.engine.run.loading import Loader
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sequences import StepResult
from lockstep.engine.taps.breaks import Pause, PauseSpec, check_condition
from lockstep.engine.taps.hub import Captured, CapturePolicy, Cut, TapPatch
from lockstep.engine.taps.measure import checksum, measure, tensor_checksum
from lockstep.engine.taps.parts import statistics
from lockstep.engine.taps.pausing import Abandon, Pauser

Resolve = Callable[[Mapping[str, str]], Rules]

#: What a rank serves while it is paused inside a step.
WHILE_PAUSED = (m.Ping, m.ReadTap, m.WatchTaps, m.PutPatches, m.ReadWeights, m.ReadWeight, m.ReadCache)


class Commands:
    """The commands of one rank, over its connection to the host."""

    def __init__(self, comm: Comm, resolve: Resolve, host: Connection[m.Command]) -> None:
        self.comm, self.resolve, self.host = comm, resolve, host
        self._runner: Runner | None = None
        self._staged: list[m.StagePatch] = []
        self._paused_seconds = 0.0  # that the pass under way has stood still

    @property
    def runner(self) -> Runner:
        """The runner; RequestError before anything was loaded."""
        if self._runner is None:
            raise RequestError("no model is loaded")
        return self._runner

    def receive(self) -> m.Command:
        """The host's next command; patches that come before it are staged."""
        while isinstance(command := self.host.receive(), m.StagePatch):
            self._staged.append(command)
        return command

    def perform(self, command: m.Command) -> r.Answer:
        """Run one command and return its answer."""
        match command:
            case m.LoadModel():
                return self._load(command)
            case m.RunStep():
                return self._step(command)
            case m.ReadTap():
                return r.TensorReport(to_wire(self._live(command.place, command.seq)))
            case m.ReadWeights():
                return r.WeightsReport(self._weights(command.compare))
            case m.ReadWeight():
                return r.TensorReport(to_wire(self._weight(command.name)))
            case m.ReadCache():
                return self._cached(command.layer, command.seq)
            case m.MeasureMemory():
                return r.MemoryReport(*held_on(str(self.comm.device)))
            case m.ChecksumCache():
                return r.ChecksumReport(self._cache_checksum())
            case m.LogitLens():
                return r.LensReport(self.runner.lens(from_wire(command.rows), command.top))
            case m.Ping() | m.Leave():
                pass
            case m.ReplaceRules():
                self._replace_rules(command)
            case m.RebindRules():
                self._rebind_rules(command)
            case m.WatchTaps():
                tensors: dict[int, Cut] = dict.fromkeys(command.last, "last")
                tensors |= dict.fromkeys(command.newest, "newest")
                tensors |= dict.fromkeys(command.full, "full")
                self.runner.watch(CapturePolicy(command.statistics, tensors, command.rows_bytes))
            case m.AddSequence():
                self.runner.add(command.seq, list(command.ids), command.sampling)
            case m.SetSampling():
                self.runner.sequence(command.seq).sampling = command.sampling
            case m.RemoveSequence():
                self.runner.remove(command.seq)
            case m.Rewind():
                self.runner.rewind(command.lengths, command.step)
            case m.DraftTokens():
                self.runner.draft(command.seq, list(command.ids))
            case m.PutPatches():
                self._put_patches(command.count)
            case m.ResumeStep() | m.AbandonStep():
                raise RequestError("no step is paused")
            case m.StagePatch():  # `receive` keeps those back
                raise RequestError("a patch is put in force by PutPatches")
            case _:
                assert_never(command)
        return r.Done()

    def _load(self, command: m.LoadModel) -> r.LoadReport:
        self._runner = None  # what was loaded before must be gone before the new weights come
        engine = command.config
        self.loader = Loader(Path(command.path), engine, self.comm)
        self._runner = Runner(self.loader.model, engine, self.comm, self.resolve(command.rules), self.loader)
        parameters = self._runner.decoder.parameters()
        unrepeatable = self._runner.decoder.unrepeatable  # tries kernels, which takes memory
        return r.LoadReport(
            bytes_read=self._runner.loaded.bytes_read,
            peak_bytes=held_on(str(self.comm.device)).peak,
            parameters=len(parameters),
            weight_bytes=sum(parameter.nbytes for parameter in parameters.values()),
            context=self._runner.context,
            unpaged=self._runner.decoder.unpaged,
            unrepeatable=unrepeatable,
        )

    def _replace_rules(self, command: m.ReplaceRules) -> None:
        resolved, runner = self.resolve(command.rules), self.runner
        if not command.reload:
            runner.reset(resolved)
            return
        self._runner = None  # should reading fail, nothing is loaded: the old weights are gone by then
        runner.rebuild(resolved)
        self._runner = runner

    def _rebind_rules(self, command: m.RebindRules) -> None:
        resolved = self.resolve(command.rules)
        if command.reload:
            self.runner.reload(resolved)
        else:
            self.runner.rules = resolved
            self.runner.rebind()

    def _put_patches(self, count: int) -> None:
        staged, self._staged = self._staged[len(self._staged) - count :], []
        self.runner.hub.patches = [
            TapPatch(
                one.tap, one.seq, one.step, tuple(slice(*bound) for bound in one.bounds),
                from_wire(one.value), one.after,
            )
            for one in staged
        ]  # fmt: skip
        self.runner.rebind()

    # --- passes --------------------------------------------------------------------------------------

    def _step(self, command: m.RunStep) -> r.StepReport | r.StepAbandoned:
        hub, self._paused_seconds = self.runner.hub, 0.0
        if command.pause is not None:
            _check(command.pause)
            hub.pauser = Pauser(self.runner.specs, self.comm, self._wait, command.pause)
            self.runner.rebind()
        try:
            return self._report(self.runner.step(command.forced))
        except Abandon:
            return r.StepAbandoned()
        finally:
            if hub.pauser is not None:
                hub.pauser = None
                self.runner.rebind()

    def _report(self, result: StepResult) -> r.StepReport:
        """The pass's report; what it captured goes ahead of it, one tensor a frame."""
        self._send_captured(result.captured)
        return r.StepReport(
            phase=result.phase,
            seconds=max(0.0, result.seconds - self._paused_seconds),  # the engine's own
            free_blocks=result.free_blocks,
            used_blocks=result.used_blocks,
            sequences=result.sequences,
            stats=_maybe(result.stats, "float32"),
            checksums=_maybe(result.checksums, "uint64"),
        )

    def _send_captured(self, captured: list[Captured]) -> None:
        captured.reverse()
        while captured:
            one = captured.pop()  # and so let go of, once it was sent
            self.host.send(r.CapturedTensor(one.tap, one.seq, one.cut, to_wire(one.tensor)))

    def _pause_report(self, pause: Pause) -> r.PauseReport:
        """Where this rank stands and what the pass has left behind so far; what it captured goes ahead."""
        batch = self.runner.hub.batch
        stats, checksums, captured = self.runner.hub.so_far()
        self._send_captured(captured)
        sequences = [
            r.PausedSequence(
                one.seq, *(x[one.start : one.stop].tolist() for x in (batch.ids, batch.positions))
            )
            for one in batch.spans
        ]
        return r.PauseReport(pause, sequences, _maybe(stats, "float32"), _maybe(checksums, "uint64"))

    def _wait(self, pause: Pause) -> PauseSpec:
        """Report to the host where this rank stands; serve reads until it is resumed."""
        self.comm.note(OpKind.PAUSED, pause.place)
        since = time.perf_counter()
        try:
            return self._paused(pause)
        finally:
            self._paused_seconds += time.perf_counter() - since

    def _paused(self, pause: Pause) -> PauseSpec:
        self.host.send(self._pause_report(pause))
        while True:
            command = self.receive()
            if isinstance(command, m.AbandonStep):
                raise Abandon
            if isinstance(command, m.Leave):
                raise Disconnected("asked to leave inside a step")
            try:
                if isinstance(command, m.ResumeStep):
                    goal = _check(command.pause)
                    self.comm.union(0)  # all go on together: the wait for a late one is no part of the pass
                    return goal
                if not isinstance(command, WHILE_PAUSED):
                    name = type(command).__name__
                    raise RequestError(f"{name} is not possible while paused inside a step")
                self.host.send(self.perform(command))
            except EngineError as error:
                self.host.send(r.CommandFailure.of(error))

    # --- reading -------------------------------------------------------------------------------------

    def _live(self, place: int, seq: int) -> Tensor:
        """A tensor that has passed in the paused step."""
        pauser, specs = self.runner.hub.pauser, self.runner.specs
        if not 0 <= place < len(specs):
            raise RequestError(f"there is no tap {place}: the model has {len(specs)}")
        if pauser is not None:
            for (at, span), x in pauser.live.items():
                if at == place:
                    for owner, part in self.runner.hub.parts(at, x, span):
                        if owner == seq:
                            return part
        raise RequestError(f"{specs[place].name} has not passed yet in this step")

    def _weights(self, compare: bool) -> dict[str, r.RankWeight]:
        expected = self.loader.checksums(self.runner.decoder.device) if compare else {}
        found = {}
        for name, held in self.runner.decoder.weights().items():
            weight = _dense(held)
            row = weight.reshape(1, -1)
            found[name] = r.RankWeight(
                shape=list(weight.shape),
                dtype=dtype_name(weight),
                stats=statistics(measure(row).cpu().numpy())[0].tolist(),
                checksum=int(checksum(row)[0]) % (1 << 64),
                checkpoint=expected.get(name),
            )
        return found

    def _weight(self, name: str) -> Tensor:
        weights = self.runner.decoder.weights()
        if name not in weights:
            raise RequestError(f"there is no weight {name!r}")
        return _dense(weights[name])

    def _cached(self, layer: int, seq: int) -> r.CacheReport:
        runner = self.runner
        if not 0 <= layer < runner.model.num_layers:
            raise RequestError(f"there is no layer {layer}: the model has {runner.model.num_layers}")
        slots = runner.slots(seq, runner.sequence(seq).kv_len)
        # Not through `read`: its buffers hold the rows of a pass that may be paused at this moment.
        keys, values = (rows.index_select(0, slots) for rows in runner.pool.of(layer))
        return r.CacheReport(to_wire(keys), to_wire(values))

    def _cache_checksum(self) -> int:
        total = 0
        for seq, sequence in self.runner.sequences.items():
            slots = self.runner.slots(seq, sequence.kv_len)
            for layer in range(self.runner.model.num_layers):
                for rows in self.runner.pool.contents(layer, seq, slots):
                    total = (total * 1_000_003 + tensor_checksum(rows)) % (1 << 64)
        return total


def _dense(weight: Tensor | KeptTensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.values()


def _check(pause: PauseSpec) -> PauseSpec:
    """Refuse a malformed condition here, where all ranks refuse alike: at the tap only some may look at it."""
    for one in pause.breaks:
        check_condition(one.when)
    return pause


def _maybe(array: NDArray[Any] | None, dtype: str) -> WireArray | None:
    return None if array is None else WireArray.of(array, dtype)
