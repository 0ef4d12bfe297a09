"""`lockstep.weights`: what an engine has really loaded, rank by rank, against the checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.engine import extras
from lockstep.engine.checkpoint.resolve import resolve
from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions.text import clean
from lockstep.workbench.attach.launch import attach
from lockstep.workbench.debugger.answers import JsonObject
from lockstep.workbench.demo.checkpoints import demo_path
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.library import html
from lockstep.workbench.library.attached import tap_request
from lockstep.workbench.library.listening import Listener
from lockstep.workbench.library.module_weights import write_module
from lockstep.workbench.paths import cache_directory
from lockstep.workbench.words.plain_text import plural

if TYPE_CHECKING:
    from torch import nn

    from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, WrongWeight
    from lockstep.workbench.diagnosis.loaded.rank_weights import RankWeights


@dataclass(frozen=True, slots=True, repr=False)
class WeightsVerdict:
    """What `weights` found. True exactly where all that ranks hold is the checkpoint's, and all of that is held."""

    found: LoadedWeights
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.found.wrong and self.complete

    @property
    def wrong(self) -> tuple[WrongWeight, ...]:
        """The parameters that are not as they should be."""
        return self.found.wrong

    @property
    def complete(self) -> bool:
        """Whether something was compared, and nothing had to be left out."""
        return self.found.compared > 0 and not self.found.left_out

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        words = f"{plural(self.found.compared, 'parameter')} on {plural(self.found.ranks, 'rank')} compared bit by bit"
        if self.wrong:
            return f"{words}: {plural(len(self.wrong), 'mistake')}"
        right = "all as in the checkpoint" + (" with the adapter" if self.found.adapted else "")
        return f"{words}: {right}" if self.complete else f"{words}: nothing wrong in them"

    def to_json(self) -> JsonObject:
        """Plain values: what `--json` prints."""
        found = self.found
        return {
            "verdict": "match" if self else "diverged" if self.wrong else "inconclusive",
            "engine": found.engine,
            "ranks": found.ranks,
            "compared": found.compared,
            "numbers": found.numbers,
            "wrong": [
                {
                    "parameter": one.parameter, "kind": one.mistake.kind, "text": one.mistake.text,
                    "ranks": list(one.ranks), "layers": list(one.layers),
                }
                for one in self.wrong
            ],
            "dtypes": [{"checkpoint": a, "memory": b, "tensors": n} for (a, b), n in found.dtypes.items()],
            "unknown": list(found.unknown),
            "left_out": list(found.left_out),
            "other_parts": list(found.other_parts),
            "adapted": dict(found.adapted),
            "notes": list(self.notes),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """What was found, a line each."""
        found = self.found
        reported = [
            f"✗ {clean(one.parameter)}{self._where(one)}: {clean(one.mistake.text)}" for one in self.wrong
        ]
        held = ", ".join(
            f"{n} of {a} held in {b}" if a != b else f"{n} in {a}" for (a, b), n in found.dtypes.items()
        )
        reported.append(f"tensors: {held or 'none'}")
        if found.adapted:
            parts = (f"{kind} {plural(n, 'weight')}" for kind, n in sorted(found.adapted.items()))
            reported.append(f"adapter: {', '.join(parts)}")
        if found.unknown:
            reported.append(f"not in the checkpoint: {_first(found.unknown)}")
        if found.left_out:
            reported.append(f"not compared: {_first(found.left_out)}")
        if found.other_parts:
            reported.append(f"not compared, as they are of no text model: {_first(found.other_parts)}")
        return [*reported, *map(clean, self.notes)]

    def _where(self, one: WrongWeight) -> str:
        """Of which layers and ranks, where that is not given by the name or of all."""
        words = []
        if "*" in one.parameter:
            layers = ", ".join(map(str, one.layers[:6])) + (", …" if len(one.layers) > 6 else "")
            words.append(f"layers {layers}" if len(one.layers) > 1 else f"layer {layers}")
        if self.found.ranks > 1:
            every = len(one.ranks) == self.found.ranks
            words.append("every rank" if every else f"rank {', '.join(map(str, one.ranks))}")
        return f" ({'; '.join(words)})" if words else ""

    def __str__(self) -> str:
        return "\n".join([f"{clean(self.found.engine)}", *self.lines(), f"verdict  {self.summary}"])

    def __repr__(self) -> str:
        return f"<WeightsVerdict {self.summary}>"

    def _repr_html_(self) -> str:
        rows = [[one.parameter, one.mistake.text, self._where(one).strip(" ()")] for one in self.wrong]
        return html.block(html.heading(self.summary), html.table(["parameter", "in memory", "where"], rows))


def _first(names: Sequence[str], most: int = 6) -> str:
    return clean(", ".join(names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def weights(
    of: Sequence[str] | nn.Module,
    *,
    model: str | Path,
    engine: str = "auto",
    adapter: str | Path | None = None,
    progress: Listener | None = None,
) -> WeightsVerdict:
    """Hold what each rank has in memory against the checkpoint `model`, by content. `of` is an engine's own command,
    which runs until its weights are loaded, before anything is computed, and is then ended; or a module of this
    process: call it on every rank, of which each holds its own against the checkpoint. `engine` as in `attach`.
    `adapter` is the folder of a LoRA adapter (PEFT's) that is to be in force: the effective weight of each of its
    targets is compared, merged or with the adapter beside it. vLLM loads adapters with the first request for one, and
    runs until then.

    The weights are written to a folder of the machine for that while: as many bytes as they have.

    AttachError where a command cannot be started or no rank wrote anything; CheckpointError for the checkpoint.
    """
    extras.need("engine", "comparing weights")
    from torch import nn

    from lockstep.workbench.diagnosis.loaded.adapter import Adapter  # these need torch
    from lockstep.workbench.diagnosis.loaded.compare import compare_weights
    from lockstep.workbench.diagnosis.loaded.config_keys import unread_words  # needs transformers
    from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks

    command = None if isinstance(of, nn.Module) else of
    if command is not None and threading.current_thread() is not threading.main_thread():
        raise UsageError("weights hands signals on to the command: call it from the main thread")
    heard, failures = progress or Listener(), tuple[str, ...]()
    path = demo_path(str(model)) or resolve(str(model))
    added = None if adapter is None else Adapter.open(Path(adapter))
    with LoadedFrom.open(path) as checkpoint, ScratchFolder.make("weights", cache_directory()) as scratch:
        dump = scratch.path / "dump"
        if isinstance(of, nn.Module):
            write_module(of, dump)
        else:
            asked = replace(
                tap_request(engine, None, None, "full"), capture="weights", adapter=added is not None
            )
            failures = attach(of, dump, asked, scratch.path).failures
            heard.note("the command was ended once its ranks had written their weights")
        ranks = read_ranks(dump)
        found = compare_weights(ranks, checkpoint, heard.report, added)
        heard.clear()
    size = ranks[0].size
    missing = (
        []
        if len(ranks) == size or command is None
        else [f"{len(ranks)} of {size} ranks have written their weights"]
    )
    own = tuple[str, ...]()
    if added is not None and added.own:
        own = (f"not compared: the adapter's own {_first(added.own)}",)
    if added is None and (beside := max(len(rank.adapters) for rank in ranks)):
        own = (f"an adapter is held beside {plural(beside, 'weight')}: --adapter DIR compares it",)
    if added is not None:
        own += _adapters_of_requests(ranks, added.path)
    return WeightsVerdict(
        found, (*missing, *failures, *own, *unread_words(path, found.engine, ranks[0].reads))
    )


def _adapters_of_requests(ranks: Sequence[RankWeights], path: Path) -> tuple[str, ...]:
    """What is to be reported where an engine loads adapters with requests."""
    if any(rank.awaits_adapter for rank in ranks):
        return ("the engine may load adapters, and ended before it had loaded one: no request named any",)
    taken = {rank.adapter_path for rank in ranks} - {""}
    return tuple(
        f"the engine has loaded the adapter of {one}" for one in sorted(taken) if not _same(one, path)
    )


def _same(one: str, path: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(path)
