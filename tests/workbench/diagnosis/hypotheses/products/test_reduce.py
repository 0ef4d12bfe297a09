"""The sum over the ranks: wrong sums of right partials, made of numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter, StepRecord, TensorRecord
from lockstep.sessions.meta import ConfigMeta, SessionMeta
from tests.workbench.diagnosis.synthetic import Case, synthetic, tiny_case
from tests.workbench.diagnosis.variants.made import accepted
from tests.workbench.diagnosis.variants.patched import wrong_sites

TAP = "layers.1.attn.o_proj"


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Llama with a bias at o_proj."""
    return tiny_case(tmp_path_factory.mktemp("biased"), "llama", attention_bias=True)


#: (partials [R, T, H], bias) -> what each rank has
Sum = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]


def engine(case: Case, path: Path, sums: Sum, tp: int = 2) -> Session:
    """The reference's tensors on `tp` ranks, with the partials of one o_proj and what the ranks make of them."""
    from safetensors.numpy import load_file

    weights = load_file(case.model_dir / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    plain = synthetic(path / "plain.session", case.floor, tp=tp)
    meta = SessionMeta(config=ConfigMeta(dtype="float32"))
    with SessionWriter.create(path / "engine.session", taps=list(plain.taps), ranks=tp, meta=meta) as writer:
        for step in plain.steps():
            record, tensors = plain.step(step), []
            for one in record.sequences:
                context = [
                    plain.tensor("layers.1.attn.context", step=step, rank=r, seq=one.seq) for r in range(tp)
                ]
                cuts = np.split(weight, tp, axis=1)
                parts = np.stack([x @ w.T for x, w in zip(context, cuts, strict=True) if x is not None])
                for rank, out in enumerate(sums(parts, bias)):
                    for tap, array in ((f"{TAP}.partial", parts[rank]), (TAP, out)):
                        array = np.ascontiguousarray(array, np.float32)
                        tensors.append(TensorRecord(tap, rank, one.seq, array, "float32"))
            writer.step(0, StepRecord(step, record.phase, record.sequences, 0.0, tensors=tensors))
    return Session.open(path / "engine.session")


def on_all(sum_of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Sum:
    return lambda parts, bias: [sum_of(parts, bias)] * len(parts)


def one_rank_alone(parts: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    right = parts.sum(0) + bias
    return [right, *[parts[1] + bias], *[right] * (len(parts) - 2)]


def halves_exchanged(x: np.ndarray) -> np.ndarray:
    half = (len(x) + 1) // 2
    return np.concatenate([x[half:], x[:half]])


def last_added_to_first(x: np.ndarray) -> np.ndarray:
    """As padding that is scattered to the token of the index zero."""
    return np.concatenate([x[:1] + x[-1:], x[1:]]) if len(x) > 1 else x


def eight_bits(parts: np.ndarray) -> np.ndarray:
    scales = np.abs(parts).max((1, 2)) / 127
    return sum(np.rint(part / scale) for part, scale in zip(parts, scales, strict=True)) * scales[0]


BUGS: list[tuple[Sum, int, str, str]] = [
    (lambda parts, bias: [part + bias for part in parts], 2, "not_reduced", "goes on with its own partial"),
    (on_all(lambda parts, bias: 2 * parts.sum(0) + bias), 2, "reduce_repeated", "summed twice"),
    (on_all(lambda parts, bias: parts.mean(0) + bias), 4, "reduce_averaged", "averaged"),
    (on_all(lambda parts, bias: parts[:3].sum(0) + bias), 4, "rank_missing", "the partial of rank 3 is missing"),
    (on_all(lambda parts, bias: parts.sum(0) + parts[0] + bias), 4, "rank_repeated", "rank 0 counts twice"),
    (on_all(lambda parts, bias: parts.sum(0) + len(parts) * bias), 4, "bias_on_every_rank", "added by every rank"),
    (on_all(lambda parts, bias: halves_exchanged(parts.sum(0) + bias)), 2, "token_parts_exchanged", "order: 1, 0"),
    (
        on_all(lambda parts, bias: last_added_to_first(parts.sum(0) + bias)), 2,
        "row_of_another_added", "the row of the last token",
    ),
    (on_all(lambda parts, bias: parts.max(0) + bias), 2, "reduced_otherwise", "their maximum goes on"),
    (on_all(lambda parts, bias: eight_bits(parts) + bias), 4, "partials_by_one_scale", "by the scale of rank 0"),
    (on_all(lambda parts, bias: np.roll(parts.sum(0) + bias, 16, -1)), 4, "columns_exchanged", "order 3, 0, 1, 2"),
    (on_all(lambda parts, bias: parts.sum(0)), 2, "bias_dropped", "o_proj.bias is not added"),
    (on_all(lambda parts, bias: parts.sum(0) + bias + 0.01 * np.arange(64)), 2, "constant_row", "same vector"),
    (one_rank_alone, 4, "not_reduced", "rank 1 goes on with its own partial"),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("sums", "tp", "name", "words"), BUGS, ids=[f"{n}-{tp}" for _, tp, n, _ in BUGS])
def test_a_wrong_sum_is_named(
    biased: Case, tmp_path: Path, sums: Sum, tp: int, name: str, words: str
) -> None:
    wrong = wrong_sites(biased, engine(biased, tmp_path, sums, tp))
    ranks = {1} if sums is one_rank_alone else set(range(tp))
    assert {rank for site in wrong.values() for rank in site.ranks} == ranks
    for site in wrong.values():
        fit = accepted(site)[0]
        assert fit.variant.name == name, fit.variant.text
        assert words in fit.variant.text


def test_a_buffer_that_is_not_cleared_is_reported(biased: Case, tmp_path: Path) -> None:
    held: list[np.ndarray] = []

    def onto_the_last(parts: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
        before = held[-2] if len(held) > 1 else None  # two sequences take turns
        out = parts.sum(0) + bias
        held.append(out + before if before is not None and before.shape == out.shape else out)
        return [held[-1]] * len(parts)

    (site,) = wrong_sites(biased, engine(biased, tmp_path, onto_the_last)).values()
    assert accepted(site)[0].variant.name == "added_to_former"


def test_a_right_sum_is_right(biased: Case, tmp_path: Path) -> None:
    assert (
        wrong_sites(biased, engine(biased, tmp_path, on_all(lambda parts, bias: parts.sum(0) + bias), 4))
        == {}
    )
