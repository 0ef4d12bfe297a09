"""What ran: the model, how it was split, the rules that differ from correct, what a reader needs to run it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.faults.catalogue import DEFAULTS, FAULTS
from sessions import Branch, Session
from workbench.demo import MODEL_DIR
from workbench.views.trail import Trail
from workbench.views.words import mapping, plural, said

_MODEL_FACTS = (
    ("num_layers", "layer"),
    ("num_heads", "head"),
    ("num_kv_heads", "KV head"),
)


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
    config, model = mapping(meta.get("config")), meta.get("model")
    branches = session.branches()
    return Identity(
        file=said(session.path.name, 80),
        model=_model_name(meta, session),
        ranks=session.ranks,
        device=said(meta.get("device") or config.get("device") or "unknown device", 24),
        dtype=said(meta.get("dtype") or config.get("dtype") or "unknown dtype", 24),
        steps=max((len(session.steps(branch.id)) for branch in branches), default=0),
        growing=session.growing,
        rules=_rules(branches, mapping(meta.get("rules"))),
        facts=tuple(_facts(meta, mapping(model), trail)),
    )


def _model_name(meta: Mapping[str, Any], session: Session) -> str:
    for key in ("model_name", "model", "model_path"):
        value = meta.get(key)
        if not isinstance(value, str) or not value.strip():
            continue
        if key == "model_name":
            return said(value, 60)
        parts = value.rstrip("/\\").replace("\\", "/").split("/")
        return "demo" if tuple(parts[-3:]) == MODEL_DIR.parts[-3:] else said(parts[-1], 60)
    return said(session.path.stem, 60)


def _rules(branches: Iterable[Branch], base: Mapping[str, Any]) -> tuple[Rule, ...]:
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


def _facts(meta: Mapping[str, Any], model: Mapping[str, Any], trail: Trail) -> Iterable[tuple[str, str]]:
    shape = [plural(model[key], noun) for key, noun in _MODEL_FACTS if isinstance(model.get(key), int)]
    if isinstance(model.get("hidden_size"), int):
        shape.append(f"hidden {model['hidden_size']}")
    if isinstance(model.get("vocab_size"), int):
        shape.append(f"vocabulary {model['vocab_size']}")
    if shape:
        yield "shape", " · ".join(shape)
    if meta.get("checkpoint"):
        yield "checkpoint", said(meta["checkpoint"], 160)
    if isinstance(meta.get("model_path"), str):
        # Its end alone: a report goes to others, who need not know the directories of this machine.
        yield "model", said("/".join(meta["model_path"].replace("\\", "/").split("/")[-2:]), 160)
    if versions := mapping(meta.get("versions")):
        yield "versions", " · ".join(f"{said(k, 30)} {said(v, 30)}" for k, v in list(versions.items())[:12])
    for key in ("source", "backend", "capture", "sampling", "seed", "created", "host"):
        if meta.get(key) is not None:
            yield key, _compact(meta[key])
    if sampling := _sampling(meta.get("sequences")):
        yield "sampling", sampling
    if trail.decode_seconds > 0:
        rate = trail.decode_tokens / trail.decode_seconds
        yield "speed", f"{rate:.1f} tokens/s in decode, recording included"


def _compact(value: object) -> str:
    """A JSON value for people: `statistics · last layers.*.attn.probs`, empty parts left out."""
    if not isinstance(value, dict):
        return said(value, 160)
    parts = []
    for key, part in value.items():
        if part is True:
            parts.append(said(key, 30))
        elif part is not None and part is not False and part not in ([], "", {}):
            words = " ".join(said(one, 60) for one in part) if isinstance(part, list) else said(part, 60)
            parts.append(f"{said(key, 30)} {words}")
    return said(" · ".join(parts), 160)


def _sampling(sequences: object) -> str:
    """How tokens were chosen, if every sequence says the same."""
    members = list(sequences.values()) if isinstance(sequences, dict) else []
    found = {_one_sampling(mapping(mapping(one).get("sampling"))) for one in members}
    return found.pop() if len(found) == 1 else ""


def _one_sampling(sampling: Mapping[str, Any]) -> str:
    return "greedy" if sampling.get("temperature") == 0 else _compact(dict(sampling))
