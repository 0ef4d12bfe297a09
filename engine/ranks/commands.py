"""What a rank can be told to do: one method a command, each answering with a map for the wire."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import EngineError, RequestError
from engine.parallel.comm import Comm
from engine.ranks.wire import Connection, Disconnected, failure, pack_array, unpack_array, widen
from engine.rules import Rules
from engine.run.loading import Loader
from engine.run.runner import Runner
from engine.run.sampler import TokenChoice
from engine.run.sampling import Sampling
from engine.run.sequences import SequenceResult, StepResult
from engine.taps.hub import CapturePolicy, TapPatch
from engine.taps.measure import checksum, measure, statistics, tensor_checksum
from engine.taps.pausing import Abandon, Break, Pause, Pauser, PauseSpec, check_condition

#: Commands that a rank serves while it is paused inside a step.
WHILE_PAUSED = frozenset({"ping", "read", "patch", "weights", "weight", "kv"})


class Commands:
    """The commands of one rank. `perform` finds the method by name: `do_step` serves "step"."""

    def __init__(
        self, comm: Comm, resolve: Callable[[Mapping[str, str]], Rules], host: Connection[dict[str, Any]]
    ) -> None:
        self.comm, self.resolve, self.host = comm, resolve, host
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """The runner; RequestError before anything was loaded."""
        if self._runner is None:
            raise RequestError("no model is loaded")
        return self._runner

    def perform(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one command and return its answer."""
        name = message.pop("do")
        method = getattr(self, f"do_{name}", None)
        if method is None:
            raise RequestError(f"there is no command {name!r}")
        answer: dict[str, Any] = method(**message) or {}
        return answer

    def do_ping(self) -> None:
        """Nothing, to see that the rank answers."""

    def do_load(self, path: str, config: dict[str, Any], rules: dict[str, str]) -> dict[str, Any]:
        """Load a checkpoint: this rank's shards only."""
        self._runner = None  # what was loaded before must be gone before the new weights come
        engine = EngineConfig(**config)
        self.loader = Loader(Path(path), engine, self.comm)
        self._runner = Runner(self.loader.model, engine, self.comm, self.resolve(rules), self.loader)
        return {
            "bytes_read": self._runner.loaded.bytes_read,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "parameters": len(self._runner.decoder.parameters()),
            "weight_bytes": sum(p.nbytes for p in self._runner.decoder.parameters().values()),
            "context": self._runner.context,
            "unpaged": self._runner.decoder.layers[0].attention.unpaged,
        }

    def do_rules(self, rules: dict[str, str], reload: bool) -> dict[str, Any]:
        """Put other rules in force, from an empty cache; `reload` reads the weights anew."""
        resolved = self.resolve(rules)
        runner = self.runner
        if not reload:
            runner.reset(resolved)
            return {}
        self._runner = None  # should reading fail, nothing is loaded: the old weights are gone by then
        runner.rebuild(resolved)
        self._runner = runner
        return {"bytes_read": runner.loaded.bytes_read}

    def do_rebind(self, rules: dict[str, str], reload: bool = False) -> None:
        """Put other rules in force for the next step and keep the cache as it is; `reload` reads the
        weights anew."""
        resolved = self.resolve(rules)
        if reload:
            self.runner.reload(resolved)
        else:
            self.runner.rules = resolved
            self.runner.rebind()

    def do_watch(self, statistics: bool, full: list[int], last: list[int]) -> None:
        """Set what every step leaves behind."""
        tensors: dict[int, Any] = dict.fromkeys(last, "last") | dict.fromkeys(full, "full")
        self.runner.watch(CapturePolicy(statistics, tensors))

    def do_add(self, seq: int, ids: list[int], sampling: dict[str, Any]) -> None:
        """A new sequence."""
        self.runner.add(seq, ids, Sampling(**sampling))

    def do_sampling(self, seq: int, sampling: dict[str, Any]) -> None:
        """Change how a sequence's further tokens are chosen."""
        self.runner.sequence(seq).sampling = Sampling(**sampling)

    def do_remove(self, seq: int) -> None:
        """A sequence is done."""
        self.runner.remove(seq)

    def do_rewind(self, lengths: dict[int, list[int]], step: int) -> None:
        """Go back: keep so many ids, computed tokens and cached rows of each sequence."""
        kept = {seq: (ids, computed, kv_len) for seq, (ids, computed, kv_len) in lengths.items()}
        self.runner.rewind(kept, step)

    def do_patch(self, patches: list[list[dict[str, Any]]]) -> None:
        """Replace the patches in force: `patches[rank]` are this rank's, in its own coordinates."""
        self.runner.hub.patches = [
            TapPatch(
                p["tap"], p["seq"], p["step"], _index(p["index"]), _tensor(p["value"]), p.get("after", False)
            )
            for p in patches[self.comm.rank]
        ]
        self.runner.rebind()

    def do_step(self, forced: dict[int, int], pause: dict[str, Any] | None) -> dict[str, Any]:
        """One forward pass, stopping where `pause` says."""
        hub = self.runner.hub
        if pause is not None:
            hub.pauser = Pauser(self.runner.specs, self.comm, self._wait, _pause_spec(pause))
            self.runner.rebind()
        try:
            return _step_answer(self.runner.step(forced))
        except Abandon:
            return {"abandoned": True}
        finally:
            if hub.pauser is not None:
                hub.pauser = None
                self.runner.rebind()

    def _wait(self, pause: Pause) -> PauseSpec:
        """Tell the host where this rank stands; serve reads until it is resumed."""
        self.host.send({
            "ok": True, "paused": True, "place": pause.place, "reason": pause.reason,
            "breaks": list(pause.breaks), "here": list(pause.here), "names": dict(pause.names),
        })  # fmt: skip
        while True:
            message = self.host.receive()
            if message["do"] == "abandon":
                raise Abandon
            if message["do"] == "exit":
                raise Disconnected("told to exit inside a step")
            try:
                if message["do"] == "resume":
                    return _pause_spec(message["pause"])
                if message["do"] not in WHILE_PAUSED:
                    raise RequestError(f"{message['do']} is not possible while paused inside a step")
                self.host.send({"ok": True, **self.perform(message)})
            except EngineError as error:
                self.host.send(failure(error))

    def do_read(self, place: int, seq: int) -> dict[str, Any]:
        """A tensor that has passed in the paused step."""
        return {"tensor": _packed(self._live(place, seq))}

    def _live(self, place: int, seq: int) -> Tensor:
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

    def do_weights(self, compare: bool = False) -> dict[str, Any]:
        """Shape, statistics and checksum of this rank's share of every weight. With `compare` the checkpoint is
        read again, and `checkpoint` is the checksum that the share has there (None: it holds no such tensor)."""
        found: dict[str, dict[str, Any]] = {}
        for name, weight in self.runner.decoder.weights().items():
            row = weight.reshape(1, -1)
            table = statistics(measure(row).cpu().numpy())[0].tolist()
            found[name] = {
                "shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch."),
                "stats": table, "checksum": int(checksum(row)[0]) % (1 << 64),
            }  # fmt: skip
        if compare:
            expected = self.loader.checksums(self.runner.decoder.device)
            for name, told in found.items():
                told["checkpoint"] = expected.get(name)
        return {"weights": found}

    def do_weight(self, name: str) -> dict[str, Any]:
        """This rank's share of one weight."""
        weights = self.runner.decoder.weights()
        if name not in weights:
            raise RequestError(f"there is no weight {name!r}")
        return {"tensor": _packed(weights[name])}

    def do_lens(self, rows: dict[str, Any], top: int) -> dict[str, Any]:
        """What residual rows [L, H] would choose if the final norm and the output head came next."""
        return {"layers": [_choice(one) for one in self.runner.lens(_tensor(rows), top)]}

    def do_kv(self, layer: int, seq: int) -> dict[str, Any]:
        """Cached keys and values [kv_len, heads, D] of a sequence in one layer."""
        runner = self.runner
        if not 0 <= layer < runner.model.num_layers:
            raise RequestError(f"there is no layer {layer}: the model has {runner.model.num_layers}")
        slots = runner.slots(seq, runner.sequence(seq).kv_len)
        # Not through `read`: its buffers hold the rows of a pass that may be paused at this moment.
        keys, values = (rows[layer].index_select(0, slots) for rows in (runner.pool.keys, runner.pool.values))
        return {"keys": _packed(keys), "values": _packed(values)}

    def do_kv_checksum(self) -> dict[str, Any]:
        """One number for all that is cached of every sequence."""
        total = 0
        for seq, sequence in self.runner.sequences.items():
            slots = self.runner.slots(seq, sequence.kv_len)
            for layer in range(self.runner.model.num_layers):
                for rows in self.runner.pool.read(layer, slots):
                    total = (total * 1_000_003 + tensor_checksum(rows)) % (1 << 64)
        return {"checksum": total}


def _pause_spec(message: dict[str, Any]) -> PauseSpec:
    breaks = tuple(
        Break(b["id"], frozenset(b["places"]), b.get("when"), b.get("rank"))
        for b in message.get("breaks", ())
    )
    for one in breaks:
        check_condition(one.when)  # here, where all ranks refuse alike: at the tap only some may look at it
    return PauseSpec(
        message.get("stop", "never"), message.get("place", -1), breaks, message.get("keep", True)
    )


def _index(bounds: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _packed(x: Tensor) -> dict[str, Any]:
    dtype = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu().contiguous()
    return pack_array((x.view(torch.int16) if dtype == "bfloat16" else x).numpy(), dtype)


def _tensor(packed: dict[str, Any]) -> Tensor:
    array, dtype = unpack_array(packed)
    return torch.from_numpy(widen(array, dtype).copy())


def _sequence(result: SequenceResult) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "seq": result.seq, "ids": result.ids, "positions": result.positions, "kv_len": result.kv_len,
        "expected_kv_len": result.expected_kv_len, "held": result.held, "block_table": result.block_table,
        "emitted": result.emitted, "forced": result.forced,
    }  # fmt: skip
    if result.choice is not None:
        answer |= _choice(result.choice)
    return answer


def _choice(choice: TokenChoice) -> dict[str, Any]:
    return {
        "chosen": choice.token, "top_ids": choice.top_ids, "top_logits": choice.top_logits,
        "logsumexp": choice.logsumexp, "entropy": choice.entropy,
    }  # fmt: skip


def _step_answer(result: StepResult) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "phase": result.phase, "seconds": result.seconds, "free": result.free_blocks,
        "used": result.used_blocks, "sequences": [_sequence(one) for one in result.sequences],
        "tensors": [
            {"tap": c.tap, "seq": c.seq, "cut": c.cut, **_packed(c.tensor)} for c in result.captured
        ],
    }  # fmt: skip
    if result.stats is not None and result.checksums is not None:
        answer |= {"stats": result.stats.tobytes(), "checksums": result.checksums.tobytes()}
    return answer
