"""The search for variants that explain a wrong operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.engine.parallel.shards import XIELU
from lockstep.sessions.limits import LimitExceeded
from lockstep.workbench import error_log
from lockstep.workbench.diagnosis.banks import ANY_FORM, stages
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, leaves
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.products.words import PRODUCTS
from lockstep.workbench.diagnosis.hypotheses.routing import ROUTED
from lockstep.workbench.diagnosis.hypotheses.rowwise import CLAMP_NUMBERS, EDITED, known_edits
from lockstep.workbench.diagnosis.hypotheses.variant import Bank, Fit, Variant, fit, preference
from lockstep.workbench.diagnosis.operations.attention import FUSED
from lockstep.workbench.diagnosis.operations.mixture import MIXTURE
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.search_time import SearchEnded, SearchTime

#: The leaves that edits are tried with.
_AT_HAND = frozenset({
    "x", "y", "gate", "up", "weight", "bias", "eps", "whole", "residual_multiplier", "layer_scalar",
    *CLAMP_NUMBERS, *XIELU,
})  # fmt: skip
#: Operations whose banks know every form that models have of them.
_ANY_FORM = (
    *ROUTED, MIXTURE, "embedding", "rope", "softmax", "weights", "scores", "conv", "head", "gated_norm", "step_size",
    "multiplier",
)  # fmt: skip


@dataclass(slots=True)
class Search:
    """Which variants have explained an operation so far: a bug is seldom in one layer alone, so that these are tried
    first in the layers after it, and nothing else where they fit."""

    time: SearchTime = field(default_factory=SearchTime)
    names: dict[str, set[str]] = field(default_factory=dict)
    #: The same by their structure, each with the layer.
    edits: dict[str, dict[tuple[Edit, ...], int | None]] = field(default_factory=dict)
    #: The banks that had them: of attention in one kernel, where each variant costs, these are asked first.
    banks: dict[str, dict[Bank, None]] = field(default_factory=dict)
    #: Why not all was tried, by the taps of which that is so.
    ended: dict[str, str] = field(default_factory=dict)

    def fits(self, site: Site) -> tuple[list[Fit], list[str]]:
        """The fits at a site, and the names of all that was tried: the banks of last resort where no other fits."""
        found: list[Fit] = []
        tried: dict[str, None] = {}
        try:
            self._try(site, found, tried)
        except (SearchEnded, LimitExceeded) as error:
            self.ended[site.tap] = str(error)
        finally:
            site.derived.clear()  # it may be larger than what was recorded
        found.sort(key=preference)
        explained = _explained(found)
        self.names[site.kind] = explained or self.names[site.kind]
        known = self.edits.setdefault(site.kind, {})
        known |= {one.variant.edits: site.layer for one in found[:1] if one.accepted and one.variant.edits}
        return found, list(tried)

    def _try(self, site: Site, found: list[Fit], tried: dict[str, None]) -> None:
        expected = self.names.setdefault(site.kind, set())
        gave = self.banks.setdefault(site.kind, {})
        if expected and site.operation in FUSED:
            self._round(site, list(gave), found, tried)
            if expected <= _explained(found):
                return
            found.clear()
        for banks in _rounds(site, self.edits.get(site.kind, {})):
            self._round(site, banks, found, tried)
            if _explained(found):
                break

    def _round(self, site: Site, banks: Iterable[Bank], found: list[Fit], tried: dict[str, None]) -> None:
        """The fits of some banks, until all that is expected is found."""
        expected, gave = self.names[site.kind], self.banks[site.kind]
        self.time.check()
        for bank in banks:
            try:
                for one in self._fits_of(bank, site, tried):
                    found.append(one)
                    gave |= {bank: None} if one.accepted else {}
                    if expected and expected <= _explained(found):
                        return
            except (SearchEnded, LimitExceeded):
                raise
            except Exception as error:  # a defect of one bank: what the others find stands
                self.ended[site.tap] = f"{bank.__name__}: {error_log.survive(error)}"

    def _fits_of(self, bank: Bank, site: Site, tried: dict[str, None]) -> Iterator[Fit]:
        for variant in _variants(site, bank):
            self.time.check()
            tried[variant.name] = None
            with np.errstate(all="ignore"):
                one = fit(site, variant)
            if one is not None:
                yield one


def _explained(found: Iterable[Fit]) -> set[str]:
    return {one.variant.name for one in found if one.accepted}


def _rounds(site: Site, edits: Mapping[tuple[Edit, ...], int | None]) -> Iterator[Iterable[Bank]]:
    """The banks of each stage; before them the edits that are expected."""
    every = stages(site.operation) if site.plain or _edited(site) or site.operation in _ANY_FORM else ANY_FORM
    if edits and site.operation in (*EDITED, *PRODUCTS):
        known = [(layer, some) for some, layer in edits.items()]
        yield [lambda at: known_edits(at, known)]
    yield from every


def _edited(site: Site) -> bool:
    """Whether hypotheses about the operation are edits of the model's own formula, all of whose leaves are at hand; the
    other banks take it for what is usual."""
    if site.operation not in EDITED:
        return False
    formula = formula_at(site)
    return set(leaves(formula)) <= _AT_HAND


def _variants(site: Site, bank: Bank) -> Iterator[Variant]:
    """A bank's variants. Where NaN or infinities went in or came out, fitting and rounding may have no answer: of such
    a bank those that it had before."""
    try:
        with np.errstate(all="ignore"):
            yield from bank(site)
    except (ValueError, OverflowError):  # numpy's LinAlgError is a ValueError
        if all(np.isfinite(part.seen).all() and np.isfinite(part.expected).all() for part in site.parts):
            raise
