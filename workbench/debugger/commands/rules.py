"""Commands that change the run: each forks a branch, so that what was stays beside what is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from lockstep.engine.faults.catalogue import DEFAULTS, check_faults, faults_of
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.answers import Position, Result
from lockstep.workbench.debugger.core.backwards import backward_to
from lockstep.workbench.debugger.core.comparing import before_and_after, compared, switched_back
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.fork_event import SamplingChange
from lockstep.workbench.debugger.core.forking import (
    fork_at,
    fork_from_start,
    fork_here,
    recorded_branch,
    recorded_fork,
    switched_at,
)
from lockstep.workbench.debugger.core.golden_reference import golden_tensor
from lockstep.workbench.debugger.core.motion import require_step
from lockstep.workbench.debugger.core.registry import Argument, Key, command
from lockstep.workbench.debugger.core.tensors import parts_of, select, whole_of
from lockstep.workbench.debugger.errors import CommandError
from lockstep.workbench.debugger.language import expressions
from lockstep.workbench.inferior.patches import Bounds, Patch, cut


@command(
    "toggle", "t", arguments=(
        Argument("fault", "fault", required=True), Argument("value", "word", required=True),
        Argument("keep_cache", "flag", help="leave the KV cache as it was made before"),
        Argument("stay", "flag", help="stay where the debugger stands: run neither branch ahead"),
    ),
    group="changing", changes=True, engine=True,
    key=Key("x", "toggles: known bugs, on and off", footer="toggles"),
    help="switch a fault on or off, on a new branch from here, and show what it changes",
    details="By default the steps up to here are run again with the fault switched, on the same tokens, so that the KV"
    " cache is consistent; --keep-cache leaves it as it is. Then the old branch and the new one run ahead to the same"
    " length, 8 steps or as far as the old one went, and the debugger stops at the first different token (inside a"
    " step it stays at its operation); --stay leaves that out. Switched back, the debugger returns to the branch from"
    " which the fault was switched. `info toggles` lists the faults.",
)  # fmt: skip
def toggle(debugger: Debugger, fault: str, value: str, keep_cache: bool, stay: bool) -> Result:
    """Another value of a seam."""
    name = f"{fault}={value}"
    line = debugger.timeline.line(debugger.position.branch)
    rules = {
        known: chosen
        for known, chosen in {**line.rules, fault: value}.items()
        if DEFAULTS.get(known) != chosen
    }
    replayed = debugger.executor is None
    if not replayed:
        faults_of({fault: value})
        switched_on = check_faults(rules, debugger.engine.inferior.model, debugger.engine.inferior.config.tp)
    switched = None if keep_cache else switched_at(debugger.timeline, line, fault, value)
    if switched is not None and not (replayed and recorded_branch(debugger, name)):
        origin = debugger.timeline.line(switched.origin)
        if origin.rules == rules:
            return switched_back(debugger, switched)
        backward_to(debugger, Position(origin.id, min(switched.step, debugger.timeline.last(origin.id))))
    at = debugger.position
    if replayed:
        stop = recorded_fork(debugger, name)
        return stop if stay else compared(debugger, at)
    if keep_cache:
        for changed in {*switched_on} ^ {*faults_of(line.rules)}:
            if changed.level == "build":
                raise CommandError(
                    f"{changed.seam} changes the cache's shape: it cannot be kept (leave out --keep-cache)"
                )
    fork = partial(fork_here if keep_cache else fork_from_start, debugger, name, rules)
    return fork() if stay else before_and_after(debugger, name, fork)


@command(
    "set", arguments=(
        Argument("what", "word", required=True, choices=("seed", "temperature", "top-k", "top-p")),
        Argument("value", "word", required=True),
    ),
    group="changing", changes=True, engine=True,
    help="change how tokens are chosen, on a new branch from here: seed, temperature, top-k, top-p",
)  # fmt: skip
def set_(debugger: Debugger, what: str, value: str) -> Result:
    """Another sampling."""
    if debugger.executor is None:
        return recorded_fork(debugger, f"{what}={value}")
    line = debugger.timeline.line(debugger.position.branch)
    name = what.replace("-", "_")
    try:
        changed: int | float = int(value) if name in ("seed", "top_k") else float(value)
    except ValueError:
        raise CommandError(f"set {what}: {clean(value, limit=40)!r} is no number") from None
    sampling: dict[int, SamplingChange] = {}
    for seq, first in debugger.engine.inferior.first_sampling.items():
        change = line.sampling.get(seq, SamplingChange())
        sampling[seq] = structs.replace(change, **{name: changed})
        sampling[seq].of(first)  # raises for a value out of range
    return fork_here(debugger, f"{what}={value}", sampling=sampling)


@command(
    "patch", arguments=(
        Argument(
            "what", "text", required=True, form="TAP[index] = VALUE", help="VALUE is a number, nan, inf or golden"
        ),
    ),
    group="changing", changes=True, engine=True,
    help="overwrite part of a tensor in this step, on a new branch",
    details="`patch layers.0.attn.q_proj[3, :8] = 0`, `patch layers.2.mlp.act = golden`. The step is run again with"
    " the patch; indices are those of the tensor that one rank alone would have had.",
)  # fmt: skip
def patch(debugger: Debugger, what: str) -> Result:
    """Another value."""
    tap, index, rest = expressions.parse_reference(what)
    if not rest.startswith("=") or not rest[1:].strip():
        raise CommandError("patch TAP[index] = VALUE, or = golden", what, len(what) - len(rest))
    at = require_step(debugger)
    wanted = rest[1:].strip()
    name = f"{tap}{expressions.show_index(index)}={wanted}"
    if debugger.executor is None:
        return recorded_fork(debugger, name)
    place = debugger.timeline.places.exact(tap)
    debugger.engine.land()  # the step is run again anyway, and what has not passed yet can be patched too
    parts = parts_of(debugger, tap)
    whole, _ = whole_of(debugger, parts)
    bounds = _bounds(whole.shape, index, tap)
    target = tuple(slice(*b) for b in bounds)
    if wanted == "golden":
        values = golden_tensor(debugger, tap, whole.shape)[target]
    else:
        values = np.full(whole[target].shape, _value(wanted, what), np.float32)
    shapes = [parts.by_rank[rank].shape for rank in sorted(parts.by_rank)]
    layout = debugger.session.tap(tap).layout
    made = Patch(place, debugger.sequence, at.step, cut(layout, shapes, bounds, values))
    line = debugger.timeline.line(at.branch)
    kept = [one for one in line.patches if one.step <= at.step]
    return fork_at(debugger, name, at.step, patches=[*kept, made])


def _bounds(shape: tuple[int, ...], index: list[Any] | None, tap: str) -> Bounds:
    """`[3, :8]` as (start, stop) of every dimension."""
    whole = np.broadcast_to(np.zeros((), np.int8), shape)
    if select(whole, index, tap).size == 0:
        raise CommandError(f"{tap}{expressions.show_index(index)} is empty: shape {shape}")
    found = []
    for dim, size in enumerate(shape):
        one = index[dim] if index is not None and dim < len(index) else [None, None]
        if isinstance(one, int):
            start = one + size if one < 0 else one
            found.append((start, start + 1))
        else:
            start, stop, _ = slice(*one).indices(size)
            found.append((start, stop))
    return tuple(found)


def _value(text: str, line: str) -> float:
    tree = expressions.parse(text)
    sign = -1.0 if isinstance(tree, list) and tree[0] == "-" and len(tree) == 2 else 1.0
    number = tree[1] if sign < 0 else tree
    special = {("name", "nan"): float("nan"), ("name", "inf"): float("inf")}
    if isinstance(number, list):
        number = special.get(
            (number[0], number[1]) if len(number) == 2 and isinstance(number[1], str) else ("", "")
        )
    if not isinstance(number, float):
        raise CommandError("a patch wants a number, nan, inf, or golden", line, max(line.find(text), 0))
    return sign * number
