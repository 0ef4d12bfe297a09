"""The embedding and the output head: bugs in transformers' own modules, named from what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.workbench.references.loading import CACHE
from tests.workbench.diagnosis.synthetic import Case, Place, Spoil, synthetic, tiny_case
from tests.workbench.diagnosis.variants.made import accepted
from tests.workbench.diagnosis.variants.patched import Patch, recorded, wrong_sites

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("untied"), "llama", tie_word_embeddings=False)


def ids(change: Any) -> Patch:
    """The embedding is asked for `change(ids)`."""
    return lambda model: model.model.embed_tokens.register_forward_pre_hook(
        lambda _m, args: (change(args[0]),)
    )


def rows(change: Any) -> Patch:
    """The embedding gives `change(rows)`."""
    return lambda model: model.model.embed_tokens.register_forward_hook(lambda _m, args, out: change(out))


def head(change: Any) -> Patch:
    return lambda model: model.lm_head.register_forward_hook(lambda _m, args, out: change(out))


def hidden(model: Any) -> None:
    """The head reads the stream before the last norm."""
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _m, args: kept.append(args[0]))
    model.lm_head.register_forward_pre_hook(lambda _m, args: (kept[-1][:, -1:],))


def pooled(model: Any) -> None:
    held: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda _m, _args, out: held.append(out))
    model.lm_head.register_forward_pre_hook(lambda _m, _args: (held[-1].mean(1, keepdim=True),))


def row_before(model: Any) -> None:
    """The head reads the last row but one, where there is one."""
    kept: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda _m, args, out: kept.append(out))
    model.lm_head.register_forward_pre_hook(lambda _m, args: (kept[-1][:, -2:][:, :1],))


def tied(model: Any) -> None:
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.clone())


def taken_from_head(model: Any) -> None:
    model.model.embed_tokens.weight.copy_(model.lm_head.weight.clone())


def untrained(model: Any) -> None:
    model.lm_head.weight.copy_(0.02 * torch.randn(131, 64, generator=torch.Generator().manual_seed(3)))


def head_rounded(model: Any) -> None:
    model.lm_head.weight.copy_(model.lm_head.weight.bfloat16().float())


def put_at(x: Tensor, ids: list[int], value: float) -> Tensor:
    return x.index_fill(-1, torch.tensor(ids), value)


def likeliest(x: Tensor) -> Tensor:
    return torch.where(x >= x.topk(20, -1).values[..., -1:], x, -torch.inf)


def penalised(change: Any) -> Patch:
    """`change(logits, how often each id was read)` of one sequence after the other."""

    def patch(model: Any) -> None:
        read: dict[int, Tensor] = {}

        def listen(_m: Any, args: Any, kwargs: Any) -> None:
            cache = kwargs[CACHE]
            counts = read.get(id(cache), torch.zeros(131))
            read["now"] = read[id(cache)] = counts + torch.bincount(kwargs["input_ids"][0], minlength=131)  # type: ignore[index]

        model.model.register_forward_pre_hook(listen, with_kwargs=True)
        model.lm_head.register_forward_hook(lambda _m, args, out: change(out, read["now"]))  # type: ignore[index]

    return patch


BUGS: list[tuple[Patch, str, str, str]] = [
    (ids(lambda i: i + 1), "embed", "ids_differ", "off by +1"),
    (ids(lambda i: i.clamp(max=10)), "embed", "ids_differ", "all get row 10"),
    (ids(lambda i: torch.where(i == 7, 100, i)), "embed", "ids_differ", "id 7 gets row 100"),
    (ids(lambda i: i.roll(1, 1) if i.shape[1] > 1 else i), "embed", "row_of_another_token", "1 before"),
    (rows(lambda x: x * 8), "embed", "embedding_scaled", "sqrt(hidden_size)"),
    (rows(lambda x: 0 * x), "embed", "rows_masked", "are zero"),
    (lambda m: m.model.embed_tokens.weight[5].zero_(), "embed", "rows_masked", "the row of id 5 is zero"),
    (rows(lambda x: x + 0.1 * torch.arange(64)), "embed", "constant_row", "same vector"),
    (rows(lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()), "embed", "embedding_normed", "root mean square"),
    (rows(lambda x: torch.nn.functional.layer_norm(x, (64,))), "embed", "embedding_normed", "layer-normed"),
    (rows(lambda x: x * (1 + x[..., :1].abs())), "embed", "token_factor", "a factor of its own"),
    (taken_from_head, "embed", "other_table", "output head"),
    (tied, "logits", "head_from_embedding", "a matrix of its own"),
    (head(lambda x: 30 * torch.tanh(x / 30)), "logits", "soft_cap", "capped softly at 30"),
    (head(lambda x: x / 0.7), "logits", "factor", "1.42857 times"),
    (head(lambda x: x.log_softmax(-1)), "logits", "log_softmax", "log-probabilities"),
    (head(torch.zeros_like), "logits", "head_zero", "all logits are zero"),
    (head(lambda x: put_at(x, [2, 130], 0)), "logits", "rows_zero", "the logits of ids 2, 130 are zero"),
    (head(lambda x: x.roll(1, -1)), "logits", "vocabulary_shifted", "stand at other ids"),
    (
        head(lambda x: torch.cat([x[..., :24], x[..., 24:48].flip(-1), x[..., 48:]], -1)),
        "logits",
        "vocabulary_permuted",
        "id 24 has that of id 47",
    ),
    (pooled, "logits", "head_input", "the mean of the tokens of the pass"),
    (hidden, "logits", "head_unnormed", "last norm is skipped"),
    (row_before, "logits", "row_of_another_token", "1 before the last"),
    (untrained, "logits", "head_untrained", "initial values"),
    (head_rounded, "logits", "low_precision_weight", "bfloat16"),
    (head(lambda x: put_at(x, [2, 7], -torch.inf)), "logits", "logits_suppressed", "ids [2, 7] are minus infinity"),
    (head(lambda x: put_at(x, [2], -1e9)), "logits", "logits_suppressed", "token ids [2]"),
    (head(lambda x: likeliest(x / 0.5)), "logits", "logits_filtered", "only the 20 likeliest are kept (top-k), and"),
    (head(lambda x: x + put_at(0 * x, [3, 50], 1.5)), "logits", "logit_bias", "1.5 is added to the logits of token"),
    (penalised(lambda x, n: torch.where(n > 0, torch.where(x > 0, x / 1.2, x * 1.2), x)),
     "logits", "repetition_penalty", "1.2"),
    (penalised(lambda x, n: x - 0.5 * (n > 0)), "logits", "presence_penalty", "presence penalty, 0.5"),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("patch", "tap", "name", "words"), BUGS, ids=[f"{t}-{n}" for _, t, n, _ in BUGS])
def test_a_bug_at_either_end_is_named(
    untied: Case, tmp_path: Path, patch: Patch, tap: str, name: str, words: str
) -> None:
    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", patch))
    assert list(wrong) == [tap]
    found = accepted(wrong[tap])
    assert name in [one.variant.name for one in found[:1]], [one.variant.text for one in found]
    assert words in found[0].variant.text


def test_a_tied_model_is_held_against_its_embedding(case: Case, tmp_path: Path) -> None:
    wrong = wrong_sites(case, recorded(case, tmp_path / "engine.session", head(lambda x: x * 0.5)))
    assert accepted(wrong["logits"])[0].variant.name == "factor"


def test_rows_of_a_rank_that_were_not_summed(case: Case, tmp_path: Path) -> None:
    tokens = {(step, one.seq): np.array(one.ids) for step in case.floor.steps()
              for one in case.floor.step(step).sequences}  # fmt: skip

    def masked(x: np.ndarray, at: Place) -> dict[int, np.ndarray]:
        low = (tokens[at.step, at.seq] < 66)[:, None]
        return {0: x * low, 1: x * ~low}

    spoil: dict[str, Spoil] = {"embed": masked}
    wrong = wrong_sites(case, synthetic(tmp_path / "engine.session", case.floor, tp=2, spoil=spoil))
    names = {name: accepted(site)[0].variant.name for name, site in wrong.items() if name.startswith("embed")}
    assert set(names.values()) == {"not_reduced"}


def test_rows_that_no_rank_has(case: Case, tmp_path: Path) -> None:
    tokens = {(step, one.seq): np.array(one.ids) for step in case.floor.steps()
              for one in case.floor.step(step).sequences}  # fmt: skip
    last = max(int(ids.max()) for ids in tokens.values())

    def lost(x: np.ndarray, at: Place) -> np.ndarray:
        return x * (tokens[at.step, at.seq] != last)[:, None]

    spoil: dict[str, Spoil] = {"embed": lost}
    wrong = wrong_sites(case, synthetic(tmp_path / "engine.session", case.floor, tp=2, spoil=spoil))
    names = {name: accepted(site)[0].variant.name for name, site in wrong.items() if name.startswith("embed")}
    assert set(names.values()) == {"vocabulary_range"}


@pytest.mark.parametrize("what", ["sinusoids", "table"])
def test_something_of_the_position_alone_is_added(case: Case, tmp_path: Path, what: str) -> None:
    table = np.random.default_rng(1).normal(0, 0.1, (64, 64))
    if what == "sinusoids":
        angles = np.arange(64)[:, None] / 1e4 ** (np.arange(0, 64, 2) / 64)
        table = 0.1 * np.concatenate([np.sin(angles), np.cos(angles)], -1)
    starts = {}
    for step in case.floor.steps():
        for one in case.floor.step(step).sequences:
            starts[step, one.seq] = (starts.get((step - 1, one.seq), (0, 0))[1],) * 2
            first = starts[step, one.seq][0]
            starts[step, one.seq] = (first, first + len(one.ids))

    def added(x: np.ndarray, at: Place) -> np.ndarray:
        return x + table[slice(*starts[at.step, at.seq])]

    spoil: dict[str, Spoil] = {"embed": added}
    wrong = wrong_sites(case, synthetic(tmp_path / "engine.session", case.floor, tp=1, spoil=spoil))
    found = accepted(wrong["embed"])[0].variant
    assert found.name == "positions_added"
    assert ("times 1/10" in found.text) is (what == "sinusoids")


def test_noise_on_a_few_logits_is_no_processor(untied: Case, tmp_path: Path) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + put_at(0 * x, list(range(9)), 1.0) * torch.randn(x.shape, generator=draws)

    draws = torch.Generator().manual_seed(4)
    wrong = wrong_sites(untied, recorded(untied, tmp_path / "engine.session", head(noisy)))
    assert not accepted(wrong["logits"])
