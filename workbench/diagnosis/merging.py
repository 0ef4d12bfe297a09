"""Findings that have one cause, drawn together: over layers, ranks and related taps.

A bug of the code shows at every layer, and a bias lost by the loader at q, k and v: one cause each. Hypotheses compete
for all findings of an operation at once: the one that explains most of them with the fewest fitted numbers is the
cause, then the next one for what it leaves. One that explains the same findings with as few numbers is reported as
well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.engine.graph import LAYER
from lockstep.engine.taps.names import local_name
from lockstep.workbench.diagnosis.findings import Hypothesis, WrongOperation
from lockstep.workbench.diagnosis.hypotheses import operands
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.misplaced_layers import misplaced_layers

#: Fitted figures of one bug may differ by so much from layer to layer.
ALIKE = 0.03

#: Share of the error that a hypothesis leaves where it is not accepted for a few numbers alone.
_NEARLY = 0.05
#: Fitted numbers beyond which they are another at each place.
_FREE = 2
#: What a hypothesis states of the place at which it fits: another at each.
_OF_PLACE = ("rank", "ranks", "shard_of", "layer", "column", "moved", "cosine")

#: Taps that one piece of code makes: what is wrong with it shows at all of them.
_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    ("attn.q_norm", "attn.k_norm"),
    ("attn.q_rope", "attn.k_rope", "attn.rope_key"),
    ("attn.k_cache", "attn.v_cache"),
    ("attn.latent_cache", "attn.rope_cache"),
    ("attn.q_a_norm", "attn.kv_a_norm"),
    ("attn.index_q_rope", "attn.index_k_rope"),
    ("attn.index_chosen", "attn.shared_chosen"),
    (*(one.tap for one in LAYER.values() if one.kind == "norm" and one.width == "hidden"), "final_norm"),
    ("attn.in_proj_b", "attn.in_proj_a"),
    ("mlp.gate", "mlp.up"),
    ("attn.o_proj.partial", "mlp.down.partial"),
    ("attn.o_proj", "mlp.down"),
    ("attn_residual", "mlp_residual"),
)
_FAMILY: Mapping[str, tuple[str, ...]] = {kind: family for family in _FAMILIES for kind in family}
_PLACE = re.compile(
    r"layers\.\d+\.|(?:q|k|v|o|gate|up|down)_proj|\b\w+_layernorm|\b[qk]_norm|(?<=model\.)norm\b"
)


@dataclass(frozen=True, slots=True, eq=False)
class FindingGroup:
    """Findings that one hypothesis explains (`chosen`: what it came to at each of them), or that none does (empty).
    `others` explain the same findings as well."""

    findings: tuple[WrongOperation, ...]
    chosen: tuple[Hypothesis, ...]
    others: tuple[Hypothesis, ...] = ()

    @property
    def first(self) -> WrongOperation:
        """The one that is reported: at the first step, the first in the forward pass."""
        return min(self.findings, key=lambda one: (min(one.steps, default=0), one.order, one.ranks))


def family_of(finding: WrongOperation) -> tuple[str, ...]:
    """The kinds of taps that share a cause with this one."""
    kind = local_name(finding.tap)
    return _FAMILY.get(kind, (kind,))


def groups(findings: Sequence[WrongOperation]) -> list[FindingGroup]:
    """The findings by their causes, in the order in which they show."""
    families: dict[tuple[str, ...], list[WrongOperation]] = {}
    misplaced = misplaced_layers(findings, [family_of(one) for one in findings])
    explained = {id(finding) for finding, _ in misplaced}
    for one in findings:
        if id(one) not in explained:
            families.setdefault(family_of(one), []).append(one)
    found = [group for family in families.values() for group in _explained(family)]
    if misplaced:
        found.append(FindingGroup(tuple(f for f, _ in misplaced), tuple(h for _, h in misplaced)))
    return sorted(found, key=lambda group: (min(group.first.steps, default=0), group.first.order))


def _explained(findings: Sequence[WrongOperation]) -> Iterator[FindingGroup]:
    left = list(findings)
    while left:
        clusters = _clusters(left)
        if not clusters:
            break
        best = min(clusters, key=_rank)
        inside = {id(finding) for finding, _ in best}
        equal = [
            other[0][1]
            for other in clusters
            if other is not best
            and {id(finding) for finding, _ in other} == inside
            and other[0][1].cost == best[0][1].cost
            and not _alike_at(*other[0], *best[0])
        ]
        for part in _rectangles(best):
            yield FindingGroup(tuple(f for f, _ in part), tuple(h for _, h in part), tuple(equal))
        left = [one for one in left if id(one) not in inside]
    for rest in _unexplained(left):
        yield FindingGroup(tuple(rest), ())


_Cluster = list[tuple[WrongOperation, Hypothesis]]


def _clusters(findings: Sequence[WrongOperation]) -> list[_Cluster]:
    """Every accepted hypothesis with all findings that it explains with the same figures."""
    clusters: list[_Cluster] = []
    for finding in findings:
        for hypothesis in finding.accepted:
            for cluster in clusters:
                if cluster[-1][0] is not finding and _alike_at(*cluster[0], finding, hypothesis):
                    cluster.append((finding, hypothesis))
                    break
            else:
                clusters.append([(finding, hypothesis)])
    for finding in findings:
        if not finding.accepted:
            _join_nearly(clusters, finding)
    return clusters


def _join_nearly(clusters: Sequence[_Cluster], finding: WrongOperation) -> None:
    """Where a hypothesis that reproduces others leaves next to nothing, it is the cause as well: a single number may
    have been rounded to the other side."""
    for hypothesis in finding.hypotheses:
        if hypothesis.residual <= _NEARLY and hypothesis.ratio <= 1:
            for cluster in clusters:
                if _alike_at(*cluster[0], finding, hypothesis):
                    cluster.append((finding, hypothesis))
                    return


def _rank(cluster: _Cluster) -> tuple[float, ...]:
    """The one that explains most with the fewest figures comes first, of equals the one that fits best."""
    figures = sum(hypothesis.cost for _, hypothesis in cluster) / len(cluster)
    gain = len(cluster) / (1 + math.log2(1 + figures) / 2)
    return (-gain, figures, sum(hypothesis.residual for _, hypothesis in cluster) / len(cluster))


def _alike_at(first: WrongOperation, a: Hypothesis, second: WrongOperation, b: Hypothesis) -> bool:
    if not (a.edits and b.edits):
        return alike(a, b)
    return len(a.edits) == len(b.edits) and all(
        _same_edit(one, first.layer, other, second.layer, free=max(a.parameters, b.parameters) > _FREE)
        for one, other in zip(a.edits, b.edits, strict=True)
    )


def _same_edit(one: Edit, layer: int | None, other: Edit, at: int | None, *, free: bool) -> bool:
    """The same change at two places: of tensors that stand alike to them, with figures that are alike, unless many were
    fitted freely."""
    if (one.place, one.kind, len(one.detail)) != (other.place, other.kind, len(other.detail)):
        return free and one.kind == other.kind == "map" and one.detail[0] == other.detail[0]
    return all(
        operands.alike(a, layer, b, at)
        if isinstance(a, str) and isinstance(b, str)
        else a == b
        or (isinstance(a, float) and isinstance(b, float) and (free or math.isclose(a, b, rel_tol=ALIKE)))
        for a, b in zip(one.detail, other.detail, strict=True)
    )


def alike(a: Hypothesis, b: Hypothesis) -> bool:
    """Whether two are the same hypothesis at two places: the name, and the figures that it is about. What was fitted
    freely, element by element, may be another at each."""
    if a.name != b.name or a.kind != b.kind:
        return False
    if max(a.parameters, b.parameters) > 1:
        return True
    return all(_same(a.fitted.get(key), value) for key, value in b.fitted.items() if key not in _OF_PLACE)


def _same(a: object, b: object) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or type(a) is not type(b):
        return a == b
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=ALIKE) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, str) and isinstance(b, str):
        return general(a) == general(b)
    return a == b if isinstance(a, int) else True  # lists of rows and columns are another in each layer


def general(text: str) -> str:
    """Names of weights and taps without their layer and module."""
    return re.sub(r"\*+", "*", _PLACE.sub("*", text))


def _rectangles(cluster: _Cluster) -> Iterator[_Cluster]:
    """One part if each kind of tap is wrong in the same layers, steps and heads; else one for each kind."""
    kinds: dict[str, _Cluster] = {}
    for finding, hypothesis in cluster:
        kinds.setdefault(local_name(finding.tap), []).append((finding, hypothesis))
    extents = {frozenset(finding.layer for finding, _ in part) for part in kinds.values()}
    if len(extents) == 1 or None in {finding.layer for finding, _ in cluster}:
        yield cluster
    else:
        yield from kinds.values()


def _unexplained(findings: Sequence[WrongOperation]) -> Iterator[list[WrongOperation]]:
    """What nobody explains, a group for each kind of tap."""
    kinds: dict[str, list[WrongOperation]] = {}
    for finding in findings:
        kinds.setdefault(local_name(finding.tap), []).append(finding)
    yield from kinds.values()
