"""Reading a session: finished or still growing, trusted or not."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import dtypes, layouts
from lockstep.sessions.errors import SessionError
from lockstep.sessions.format import captures, feeding, flight, journal, migrate, read_rows
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.chunks import StepArrays
from lockstep.sessions.format.meta_table import MetaTable
from lockstep.sessions.format.schema import CHECKSUMS, PROTECTED_SINCE, STATS
from lockstep.sessions.format.totals import Totals
from lockstep.sessions.history import BranchHistory
from lockstep.sessions.layouts import Rebuilt
from lockstep.sessions.limits import DEFAULT, RECORD_BYTES, ReadLimits, ReadMeter
from lockstep.sessions.lock import holder
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import (
    STATISTICS,
    Branch,
    Event,
    StepInFlight,
    StepRecord,
    Tap,
    TensorKey,
    TensorRecord,
    VerdictRecord,
)
from lockstep.sessions.replicas import Replicas


class Session:
    """A session, read-only. Safe to use from several threads.

    Every method raises `SessionError` where the file contradicts the format or is asked for what it does
    not have (a branch, a step, a tap); what was merely not captured is None. Strings come as they were
    recorded: `sessions.text.clean` them before they reach a terminal.
    """

    version: int  # of the file's format
    taps: tuple[Tap, ...]
    ranks: int
    replicas: Replicas

    def __init__(self, path: Path, limits: ReadLimits, *, follow: bool = True) -> None:
        """Use `open`."""
        self.path = Path(path)
        self.meter = ReadMeter(self.path.name, limits)
        self._archive = Archive(self.path, self.meter, follow=follow)
        self._meta = MetaTable()
        self._totals = Totals(self._archive)
        self._kept = captures.KeptSteps(self._archive)
        try:
            self._load()
        except BaseException:
            self._archive.close()
            raise

    @classmethod
    def open(cls, path: Path, limits: ReadLimits = DEFAULT, *, follow: bool = True) -> Session:
        """Open the session at `path`; `SessionError` if it is not a valid session, `LimitExceeded` where it would cost
        more than `limits`. `follow`: read whatever goes by that name later; else this very file, deleted or not."""
        return cls(path, limits, follow=follow)

    def close(self) -> None:
        """Close the file."""
        self._archive.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def view(self) -> AbstractContextManager[None]:
        """Inside, what this thread reads has the time of one view; `LimitExceeded` when it is over."""
        return self.meter.view()

    def walk(self, *others: Session) -> AbstractContextManager[None]:
        """As `view`, with a second more for each MiB of the file, and of `others`: for what reads all of them."""
        return self.meter.view(sum(one._archive.file_bytes() for one in (self, *others)))

    def refresh(self) -> bool:
        """Read what was written since; True if anything was. Cheap when nothing was."""
        if self._archive.state() == self._state:
            return False
        self._load()
        return True

    def _load(self) -> None:
        """Read everything small: meta, taps, branches, which steps there are."""
        archive, totals, meter = self._archive, self._totals, self.meter
        with meter.view(), archive.snapshot():
            state = archive.state()
            totals.problems.clear()
            self.version = archive.version
            meta = {read_rows.text(k, "meta"): v for k, v in totals.rows("meta")}
            self._meta.read(meta, self.version, meter)
            named = archive.rows("taps", "ORDER BY id")
            ranks = read_rows.ranks(self._meta.ranks, len(named))
            nbytes = len(named) * (2 * RECORD_BYTES + 64 * ranks)
            meter.room(nbytes, f"{len(named)} taps on {ranks} ranks")
            taps = read_rows.taps(named)
            totals.expect("taps", len(taps))
            history = BranchHistory.read(archive, totals)
            self._state = state
        self.taps, self.ranks, self._history = taps, ranks, history
        self._by_name = {tap.name: tap for tap in taps}
        self.replicas = Replicas([tap.layout for tap in taps], ranks)
        self._arrays = StepArrays(self._archive, len(taps), ranks)
        self.meter.keep(self._arrays, nbytes)

    # --- what the session is -----------------------------------------------------------------------

    @property
    def meta(self) -> SessionMeta:
        """Metadata: model, configuration, rules, prompts, versions, …"""
        return self._meta.meta

    @property
    def meta_problems(self) -> list[str]:
        """The fields of the metadata that did not validate, and are treated as unknown."""
        return self._meta.problems

    @property
    def protected(self) -> bool:
        """Whether its rows carry checksums: damage to a file of an earlier version can go unnoticed."""
        return self.version >= PROTECTED_SINCE

    @property
    def losses(self) -> list[str]:
        """What is missing of the file, and what is damaged or missing of the tables that are read as a whole: it is
        left out of what is shown. Damage to a step or a tensor is an error where that is read."""
        if not holder(self.path):  # what is just being written is looked at when it is read
            with self.view():
                self._totals.look("events", "verdicts")
        return [self.missing] * bool(self.missing) + list(self._totals.problems)

    @property
    def growing(self) -> bool:
        """Whether its writer has not closed it: it is still being written, or its writer was killed."""
        return self._archive.growing or self._meta.recording

    @property
    def missing(self) -> str:
        """ "incomplete: the log … is not beside it …" of a copy that lacks its newest steps; else ""."""
        return self._archive.missing

    def branches(self) -> list[Branch]:
        """Every branch, 0 ("main") first."""
        return list(self._history.branches.values())

    def steps(self, branch: int = 0) -> range:
        """The steps of a branch, those it shares with its parents included."""
        return self._history.steps(branch)

    def owner(self, step: int, branch: int = 0) -> int:
        """The branch that recorded a step of `branch`: itself, or the ancestor that it shares the step with."""
        return self._history.owner(branch, step)

    def own_steps(self, branch: int) -> range:
        """The steps that the branch recorded itself, from its fork on."""
        return self._history.own_steps(branch)

    def has_tap(self, name: str) -> bool:
        """Whether the session knows a tap of that name."""
        return name in self._by_name

    def tap(self, name: str) -> Tap:
        """The tap of that name."""
        if name not in self._by_name:
            raise SessionError(f"{self.path.name} has no tap {name!r} among its {len(self.taps)}.")
        return self._by_name[name]

    # --- steps -------------------------------------------------------------------------------------

    def step(self, step: int, branch: int = 0) -> StepRecord:
        """What happened at a step, without its arrays (`stats`, `checksums`, `tensor` read those)."""
        return self._kept.record(self._history.owner(branch, step), step, self._step)

    def _step(self, owner: int, step: int) -> StepRecord:
        with self._archive.snapshot():
            heads = self._archive.rows("steps", "WHERE branch = ? AND step = ?", owner, step)
            within = "WHERE branch = ? AND step = ? ORDER BY seq"
            sequences = self._archive.rows("sequences", within, owner, step)
            record = read_rows.step_record(step, owner, heads, sequences, self.ranks, self.meter)
        return migrate.step_record(record, self.meta.model.num_layers) if self.version == 1 else record

    def sequences(self, branch: int = 0, *, start: int = 0) -> dict[int, range]:
        """From the first to the last step of a branch, `start` and later, that fed each sequence, by its number."""
        return feeding.sequences(self._archive, self._history.segments(branch), start)

    def stats(self, step: int, branch: int = 0) -> NDArray[np.float32] | None:
        """Every tap's statistics at a step, [taps, ranks, 8], ordered as STATISTICS; None: not recorded."""
        return self._arrays.at(STATS, self._history.owner(branch, step), step)

    def checksums(self, step: int, branch: int = 0) -> NDArray[np.uint64] | None:
        """Every tap's bit-exact checksum at a step, [taps, ranks]; None: not recorded."""
        return self._arrays.at(CHECKSUMS, self._history.owner(branch, step), step)

    def series(
        self, tap: str, stat: str, rank: int, branch: int = 0, *, start: int = 0, stop: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """One statistic of one tap over the steps in [start, stop) that have statistics: (steps, values)."""
        if stat not in STATISTICS:
            raise SessionError(f"no statistic {stat!r}; there are {', '.join(STATISTICS)}.")
        if not 0 <= rank < self.ranks:
            raise SessionError(f"no rank {rank}; {self.path.name} has ranks 0 to {self.ranks - 1}.")
        index, pick = self.tap(tap).index, (rank, STATISTICS.index(stat))
        found = [(np.empty(0, np.int64), np.empty(0, np.float32))]
        for owner, first, end in self._history.segments(branch):
            end = end if stop is None else min(end, stop)
            found.append(self._arrays.series(STATS, index, pick, owner, max(first, start), end))
        steps, values = zip(*found, strict=True)
        return np.concatenate(steps), np.concatenate(values)

    def in_flight(self) -> tuple[int, StepInFlight] | None:
        """A branch and the step of it that has stopped in its middle; its tensors are read as those of any step."""
        return flight.read(self._archive, len(self.taps), self.ranks)

    def _holder(self, step: int, branch: int) -> int:
        """The branch that holds what a step has captured."""
        found = self.in_flight() if step == self.steps(branch).stop else None
        here = found is not None and (found[0], found[1].step) == (branch, step)
        return branch if here else self._history.owner(branch, step)

    # --- tensors -----------------------------------------------------------------------------------

    def captured(self, step: int, branch: int = 0) -> list[TensorKey]:
        """Every tensor captured at a step, in execution order."""
        return captures.keys(self._archive, self.taps, self.ranks, self._holder(step, branch), step)

    def captured_taps(self, branch: int = 0) -> set[str]:
        """The taps of which any tensor was captured on the branch."""
        return captures.ever(self._archive, self.taps, self._history.segments(branch))

    def stored(
        self, tap: str, *, first: int, stop: int, seq: int = 0, branch: int = 0
    ) -> dict[int, Hashable]:
        """By step, a value that changes when other tensors of the tap are stored for it: a cache key."""
        end = self.steps(branch).stop
        segments = [*self._history.segments(branch), (branch, end, end + 1)]  # the last is a step in flight
        return captures.stored(self._archive, self.tap(tap), segments, range(first, stop), seq)

    def capture(
        self, tap: str, *, step: int, rank: int, seq: int = 0, branch: int = 0, slice: str | None = None
    ) -> TensorRecord | None:
        """One captured tensor exactly as recorded. `slice` None: the whole if there is one, else a part."""
        owner = self._holder(step, branch)
        return captures.one(self._kept, self.tap(tap), owner, step, rank, seq, slice)

    def parts(
        self, tap: str, *, step: int, seq: int = 0, branch: int = 0, slice: str | None = None
    ) -> dict[int, TensorRecord]:
        """What each rank captured of a tap at a step, exactly as recorded."""
        with self._kept.snapshot():
            found = {
                rank: self.capture(tap, step=step, rank=rank, seq=seq, branch=branch, slice=slice)
                for rank in range(self.ranks)
            }
        return {rank: part for rank, part in found.items() if part is not None}

    def tensor(
        self, tap: str, *, step: int, rank: int, seq: int = 0, branch: int = 0, slice: str | None = None
    ) -> NDArray[Any] | None:
        """One captured tensor, bfloat16 widened to float32; None: not captured."""
        found = self.capture(tap, step=step, rank=rank, seq=seq, branch=branch, slice=slice)
        return None if found is None else self.meter.keep_array(dtypes.widen(found.array, found.dtype))

    def rebuilt(
        self, tap: str, *, step: int, seq: int = 0, branch: int = 0, slice: str | None = None
    ) -> Rebuilt:
        """The tensor that one rank alone would have had, from all ranks by the tap's layout."""
        parts = self.parts(tap, step=step, seq=seq, branch=branch, slice=slice)
        found = layouts.rebuild_records(self.tap(tap).layout, parts, self.ranks)
        if found.array is not None:
            self.meter.keep_array(found.array)
        return found

    # --- journal and judgements ----------------------------------------------------------------------

    def events(
        self, *, branch: int | None = None, step: int | None = None, kind: str | None = None, after: int = 0
    ) -> list[Event]:
        """The journal in order, filtered; `after` an event's id gives the newer ones."""
        return journal.events(self._totals, self.meter, after, (branch, step, kind))

    def verdicts(
        self, *, branch: int | None = None, step: int | None = None, tap: str | None = None
    ) -> list[VerdictRecord]:
        """The judgements, by branch, step and (where the session knows the tap) execution order."""
        return journal.verdicts(self._totals, self.meter, self._by_name, (branch, step, tap))
