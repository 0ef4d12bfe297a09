"""What ran: the model, how it was split, the faults that are switched on, what a reader needs to run it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lockstep.engine.taps.names import matches
from lockstep.sessions import Session
from lockstep.sessions.meta import CaptureMeta, SamplingMeta, SessionMeta
from lockstep.sessions.state import State, state_of
from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.views.branches import BranchLine, branch_lines
from lockstep.workbench.views.trail import Trail
from lockstep.workbench.words.plain_text import one_line, plural


class CatalogueEntry(Protocol):
    """What the catalogue of faults states of a value that a seam may have. (Views do not import the faults.)"""

    @property
    def seam(self) -> str:
        """Where it acts: its name."""

    @property
    def value(self) -> str:
        """The wrong value."""

    @property
    def correct(self) -> str:
        """The correct one."""

    @property
    def title(self) -> str:
        """What the wrong value does."""


@dataclass(frozen=True, slots=True)
class SwitchedFault:
    """A fault that is switched on: the correct value, and what the catalogue states of it ("" if unknown)."""

    name: str
    value: str
    correct: str
    title: str
    branches: tuple[str, ...]  # the branches under it


@dataclass(frozen=True, slots=True)
class Identity:
    """The session in a few words. `facts` are (label, value) pairs for people."""

    file: str
    model: str
    ranks: int
    device: str
    dtype: str
    steps: int
    state: State
    faults: tuple[SwitchedFault, ...]
    facts: tuple[tuple[str, str], ...]


def identify(session: Session, trail: Trail, known: Iterable[CatalogueEntry]) -> Identity:
    """Read from what the session states of itself. `known` is the catalogue of faults."""
    lines = branch_lines(session)
    return Identity(
        file=file_name(session),
        model=model_name(session),
        ranks=session.ranks,
        device=device_name(session),
        dtype=dtype_name(session),
        steps=max((line.steps for line in lines), default=0),
        state=state_of(session),
        faults=_faults(lines, known),
        facts=tuple(_facts(session, trail)),
    )


def file_name(session: Session) -> str:
    """The session's file, without its directory."""
    return one_line(session.path.name, 80)


def model_name(session: Session) -> str:
    """What the model is called, else the last part of its path, else the name of the session."""
    model = session.meta.model
    if model.name.strip():
        return one_line(model.name, 60)
    if model.path.strip():
        parts = _parts(model.path.rstrip("/\\"))
        return "demo" if tuple(parts[-3:]) == MODEL_DIR.parts[-3:] else one_line(parts[-1], 60)
    return one_line(session.path.stem, 60)


def device_name(session: Session) -> str:
    """Where the ranks ran, and that they shared GPUs where they did: their sums then passed through the host."""
    config = session.meta.config
    shared = config.device.startswith("cuda") and config.backend == "gloo"
    return one_line(f"{config.device} over gloo" if shared else config.device or "unknown device", 24)


def dtype_name(session: Session) -> str:
    """What the model computed in, by torch's name."""
    return one_line(session.meta.config.dtype or "unknown dtype", 24)


def _parts(path: str) -> list[str]:
    return path.replace("\\", "/").split("/")


def _faults(lines: Iterable[BranchLine], known: Iterable[CatalogueEntry]) -> tuple[SwitchedFault, ...]:
    """A branch lists the faults that are switched on, and nothing else."""
    catalogue = {(one.seam, one.value): one for one in known}
    correct = {one.seam: one.correct for one in catalogue.values()}
    found: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for fault in line.rules:
            found.setdefault(fault, []).append(line.name)
    return tuple(
        SwitchedFault(
            *(name, value, correct.get(name, "")),
            catalogue[name, value].title if (name, value) in catalogue else "",
            tuple(on),
        )
        for (name, value), on in found.items()
    )


def _facts(session: Session, trail: Trail) -> Iterable[tuple[str, str]]:
    meta = session.meta
    model = meta.model
    counts = ((model.num_layers, "layer"), (model.num_heads, "head"), (model.num_kv_heads, "KV head"))
    shape = [plural(count, noun) for count, noun in counts if count is not None]
    if model.hidden_size is not None:
        shape.append(f"hidden {model.hidden_size}")
    if model.vocab_size is not None:
        shape.append(f"vocabulary {model.vocab_size}")
    if shape:
        yield "shape", " · ".join(shape)
    if model.checkpoint:
        yield "checkpoint", one_line(model.checkpoint, 160)
    if model.path:
        # Its end alone: a report goes to others, who need not know the directories of this machine.
        yield "model", one_line("/".join(_parts(model.path)[-2:]), 160)
    if meta.versions:
        pairs = list(meta.versions.items())[:12]
        yield "versions", " · ".join(f"{one_line(k, 30)} {one_line(v, 30)}" for k, v in pairs)
    if meta.source:
        yield "source", one_line(meta.source, 160)
    if meta.config.backend:
        yield "backend", one_line(meta.config.backend, 160)
    if meta.capture is not None:
        yield "capture", _compact(_of_taps(meta.capture, [tap.name for tap in session.taps]))
    if sampling := _sampling(meta):
        yield "sampling", sampling
    if trail.decode_seconds > 0:
        rate = trail.decode_tokens / trail.decode_seconds
        yield "speed", f"{rate:.1f} tokens/s in decode, recording included"


def _of_taps(meta: CaptureMeta, taps: Sequence[str]) -> CaptureMeta:
    """Without the globs that fit no tap: the usual ones are of all families."""

    def fitting(globs: Sequence[str]) -> tuple[str, ...]:
        return tuple(glob for glob in globs if any(matches(tap, [glob]) for tap in taps))

    return msgspec.structs.replace(meta, full=fitting(meta.full), last=fitting(meta.last))


def _compact(meta: CaptureMeta | SamplingMeta) -> str:
    """For people: `statistics · last layers.*.attn.probs`, empty parts left out."""
    parts = []
    for key, part in msgspec.structs.asdict(meta).items():
        if part is True:
            parts.append(key)
        elif part is not None and part is not False and part != ():
            words = (
                " ".join(one_line(one, 60) for one in part) if isinstance(part, tuple) else one_line(part, 60)
            )
            parts.append(f"{key} {words}")
    return one_line(" · ".join(parts), 160)


def _sampling(meta: SessionMeta) -> str:
    """How tokens were chosen, if every sequence states the same."""
    found = {_one_sampling(one.sampling) for one in meta.sequences.values() if one.sampling is not None}
    return found.pop() if len(found) == 1 else ""


def _one_sampling(sampling: SamplingMeta) -> str:
    return "greedy" if sampling.temperature == 0 else _compact(sampling)
