"""What ran: the model, how it was split, the rules that differ from correct, what a reader needs to run it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from engine.faults.catalogue import DEFAULTS, FAULTS
from sessions import Branch, Session
from sessions.meta import CaptureMeta, ModelMeta, SamplingMeta, SessionMeta
from workbench.demo import MODEL_DIR
from workbench.views.trail import Trail
from workbench.views.words import plural, said


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that differs from correct: its correct value, and what the catalogue says of it ("" if unknown)."""

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
    growing: bool
    rules: tuple[Rule, ...]
    facts: tuple[tuple[str, str], ...]


def identify(session: Session, trail: Trail) -> Identity:
    """Read from the session's meta table, whatever a stranger wrote into it."""
    meta = session.meta
    branches = session.branches()
    return Identity(
        file=said(session.path.name, 80),
        model=_model_name(meta.model, session),
        ranks=session.ranks,
        device=said(meta.config.device or "unknown device", 24),
        dtype=said(meta.config.dtype or "unknown dtype", 24),
        steps=max((len(session.steps(branch.id)) for branch in branches), default=0),
        growing=session.growing,
        rules=_rules(branches, meta.rules),
        facts=tuple(_facts(meta, trail)),
    )


def _model_name(model: ModelMeta, session: Session) -> str:
    if model.name.strip():
        return said(model.name, 60)
    if model.path.strip():
        parts = _parts(model.path.rstrip("/\\"))
        return "demo" if tuple(parts[-3:]) == MODEL_DIR.parts[-3:] else said(parts[-1], 60)
    return said(session.path.stem, 60)


def _parts(path: str) -> list[str]:
    return path.replace("\\", "/").split("/")


def _rules(branches: Iterable[Branch], base: Mapping[str, str]) -> tuple[Rule, ...]:
    titles = {(fault.rule, fault.value): fault.title for fault in FAULTS}
    found: dict[tuple[str, str], list[str]] = {}
    for branch in branches:
        rules = {**base, **branch.rules} if branch.id == 0 else branch.rules
        for name, value in rules.items():
            if DEFAULTS.get(name) != value:
                found.setdefault((str(name), str(value)), []).append(said(branch.name, 40))
    return tuple(
        Rule(
            said(name, 40), said(value, 40), DEFAULTS.get(name, ""), titles.get((name, value), ""), tuple(on)
        )
        for (name, value), on in found.items()
    )


def _facts(meta: SessionMeta, trail: Trail) -> Iterable[tuple[str, str]]:
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
        yield "checkpoint", said(model.checkpoint, 160)
    if model.path:
        # Its end alone: a report goes to others, who need not know the directories of this machine.
        yield "model", said("/".join(_parts(model.path)[-2:]), 160)
    if meta.versions:
        pairs = list(meta.versions.items())[:12]
        yield "versions", " · ".join(f"{said(k, 30)} {said(v, 30)}" for k, v in pairs)
    if meta.source:
        yield "source", said(meta.source, 160)
    if meta.config.backend:
        yield "backend", said(meta.config.backend, 160)
    if meta.capture is not None:
        yield "capture", _compact(meta.capture)
    if sampling := _sampling(meta):
        yield "sampling", sampling
    if trail.decode_seconds > 0:
        rate = trail.decode_tokens / trail.decode_seconds
        yield "speed", f"{rate:.1f} tokens/s in decode, recording included"


def _compact(told: CaptureMeta | SamplingMeta) -> str:
    """For people: `statistics · last layers.*.attn.probs`, empty parts left out."""
    parts = []
    for key, part in msgspec.structs.asdict(told).items():
        if part is True:
            parts.append(key)
        elif part is not None and part is not False and part != ():
            words = " ".join(said(one, 60) for one in part) if isinstance(part, tuple) else said(part, 60)
            parts.append(f"{key} {words}")
    return said(" · ".join(parts), 160)


def _sampling(meta: SessionMeta) -> str:
    """How tokens were chosen, if every sequence says the same."""
    found = {_one_sampling(one.sampling) for one in meta.sequences.values() if one.sampling is not None}
    return found.pop() if len(found) == 1 else ""


def _one_sampling(sampling: SamplingMeta) -> str:
    return "greedy" if sampling.temperature == 0 else _compact(sampling)
