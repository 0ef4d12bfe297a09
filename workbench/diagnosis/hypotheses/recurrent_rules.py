"""Other forms of the delta rule: what beta multiplies, and which state is corrected.

The rule reads what the state has for a key, and writes beta times the difference between the value and that
(arXiv:2406.06484); with a decay, both are done to the state that has decayed (arXiv:2412.06464).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lockstep.engine.graph.recurrence import Array


@dataclass(frozen=True, slots=True)
class Rule:
    """`rated`: whether beta multiplies the value; `taken_off`: what is taken off of what the state has for the key,
    all of it, beta times it, or nothing. `read_early`: that is read before the state decays; `written_early`: the
    update decays as well, as what is there does."""

    rated: bool
    taken_off: str
    read_early: bool
    written_early: bool

    @property
    def words(self) -> str:
        """How it differs from the right one."""
        found = []
        if self.taken_off == "nothing":
            found.append(
                "what the state has for a key is not taken off before a value is written: no delta rule"
            )
            if not self.rated:
                found.append("values are not multiplied by beta")
        elif not self.rated and self.taken_off == "all":
            found.append("the correction of the state is not multiplied by beta")
        elif not self.rated:
            found.append("beta multiplies what the state has for a key alone, not the value")
        elif self.taken_off == "all":
            found.append("beta multiplies the value alone: what the state has for a key is taken off whole")
        if self.read_early:
            found.append("what the state has for a key is read before the state has decayed")
        if self.written_early:
            found.append("the state decays behind the update, which decays as well")
        return "; ".join(found)


#: By the ending of a function's name.
RULES: Mapping[str, Rule] = {
    f"_by_rule_{number}": Rule(*form)
    for number, form in enumerate(
        product((True, False), ("its share", "all", "nothing"), (False, True), (False, True))
    )
    if form not in ((True, "its share", False, False), (True, "its share", True, True))  # right; decayed last
}


def _states(rule: Rule, before: Array, k: Array, v: Array, beta: Array, kept: Array) -> Iterator[Array]:
    """The state [H, D, V] after each token; as `engine.graph.recurrence` has them."""
    state, values = before, v.reshape(len(v), beta.shape[1], -1)
    for key, value, rate, share in zip(k, values, beta[..., None], kept[:, :, None, None], strict=True):
        decayed = state * share
        read = np.einsum("hdv,hd->hv", state if rule.read_early else decayed, key)
        by = {"its share": rate, "all": 1.0, "nothing": 0.0}[rule.taken_off]
        written = key[:, :, None] * ((rate if rule.rated else 1.0) * value - by * read)[:, None, :]
        state = (state + written) * share if rule.written_early else decayed + written
        yield state


def _last(rule: Rule, before: Array, *rows: Array) -> Array:
    return [before, *_states(rule, before, *rows)][-1]


def _read(rule: Rule, q: Array, before: Array, *rows: Array) -> Array:
    states = _states(rule, before, *rows)
    return np.stack([np.einsum("hdv,hd->hv", x, one) for x, one in zip(states, q, strict=True)]).reshape(
        len(q), -1
    )


#: By name what may run in place of `last_state` and `read_out`.
BY_RULES: Mapping[str, Callable[..., Any]] = {
    f"{name}{ending}": partial(made, rule)
    for ending, rule in RULES.items()
    for name, made in (("last_state", _last), ("read_out", _read))
}
