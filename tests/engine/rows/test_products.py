"""Products of a row or two on threads that help each other, against float64 and against torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.engine.compiled import kernels
from lockstep.engine.rows import products
from lockstep.engine.rules import CORRECT
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps import cpu_pass
from lockstep.engine.taps.hub import CapturePolicy
from tests.engine.harness import local_runner

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [5, 6, 7, 130, 12]


@pytest.fixture(autouse=True)
def two_threads() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("tokens", [1, 2, products.FEW])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (1, 5000), (3001, 96), (896, 4864)])
def test_a_product_is_that_of_float64(rows: int, columns: int, tokens: int) -> None:
    x, matrix = torch.randn(tokens, columns), torch.randn(rows, columns)
    with products.reading():
        found = products.product(x, matrix)
    assert found is not None
    assert found.shape == (tokens, rows)
    noise = torch.finfo(torch.float32).eps * columns * (x.double().abs() @ matrix.double().abs().T)
    assert ((found.double() - x.double() @ matrix.double().T).abs() <= noise).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 1 << 12, 1 << 30])
def test_bits_depend_on_no_thread_no_chunk_no_shard_and_no_other_row(
    threads: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, matrix = torch.randn(products.FEW, 896), torch.randn(1000, 896)
    with products.reading():
        whole = products.product(x, matrix)
    monkeypatch.setattr(products, "CHUNK", chunk)
    torch.set_num_threads(threads)
    with products.reading():
        assert torch.equal(products.product(x, matrix), whole)
        assert torch.equal(products.product(x[1:], matrix), whole[1:])
        assert torch.equal(products.product(x, matrix[333:999]), whole[:, 333:999])


def test_threads_that_come_and_go_lose_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than cores, which sleep between many of the products and wake in the middle of others."""
    monkeypatch.setattr(products, "PATIENCE", 20)
    monkeypatch.setattr(products, "CHUNK", 256)
    torch.set_num_threads(4)
    random = torch.Generator().manual_seed(0)
    with products.reading():
        for number in range(2000):
            rows, columns = 1 + number * 7 % 190, 1 + number * 13 % 70
            x, matrix = (torch.randint(-9, 9, (n, columns), generator=random).float() for n in (1, rows))
            assert torch.equal(products.product(x, matrix), x @ matrix.T), (rows, columns)


def test_what_is_not_for_the_kernels_is_left_to_torch() -> None:
    x, matrix = torch.randn(products.FEW + 1, 40), torch.randn(50, 40)
    assert products.product(x[:1], matrix) is None  # outside
    with products.reading():
        assert products.product(x, matrix) is None
        assert products.product(x[:0], matrix) is None
        assert products.product(x[:1, :20], matrix[:, ::2]) is None
        assert products.product(x.T[:1, :3].contiguous(), torch.randn(8, 3)) is not None
        for other in (x[:1, :39], x[0], x[:1].double(), x[:1].to(torch.bfloat16), x[:1, None]):
            assert products.product(other, matrix) is None
        assert products.product(x[:1], matrix.double()) is None
        assert products.product(x[:1], matrix[0]) is None


def test_torch_has_its_threads_again_whatever_happens() -> None:
    seen = []

    def aborted() -> None:
        with products.reading():
            seen.append((torch.get_num_threads(), products.is_reading()))
            raise RuntimeError("aborted")

    with pytest.raises(RuntimeError, match="aborted"):
        aborted()
    assert [*seen, (torch.get_num_threads(), products.is_reading())] == [(1, True), (2, False)]


def test_without_numba_torch_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(products, "kernels", kernels.__wrapped__)
    monkeypatch.setattr(products, "_crew", products._crew.__wrapped__)
    monkeypatch.setattr(products, "refusal", products.refusal.__wrapped__)
    assert products.refusal() == (
        "no products of few rows here: ModuleNotFoundError: import of numba halted; None in sys.modules"
    )
    with products.reading():
        assert (torch.get_num_threads(), products.is_reading()) == (2, False)


@pytest.mark.parametrize(
    ("rows", "threads", "short"),
    [
        ([2048], 16, True),
        ([2049], 1, False),
        ([1000] * 8, 2, True),
        ([1000] * 8, 3, False),
        ([256] * 8, 64, True),
    ],
)
def test_attention_on_one_thread_is_for_short_caches(rows: list[int], threads: int, short: bool) -> None:
    torch.set_num_threads(threads)
    assert products.is_short(rows) is short


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = products._Crew.product
    monkeypatch.setattr(products._Crew, "product", lambda self, x, matrix: right(self, x, matrix) + 1e-2)
    refusal = products.refusal.__wrapped__()
    assert refusal == "no products of few rows here: the kernel is wrong on this CPU"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that were made."""
    products.refusal()  # makes one of its own, once
    right, found = products._Crew.product, list[tuple[int, ...]]()

    def product(self: object, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        found.append((len(x), *matrix.shape))
        return right(self, x, matrix)

    monkeypatch.setattr(products._Crew, "product", product)
    return found


def test_a_heavy_decoder_reads_its_matrices_once_a_token(
    variant: Callable[[str], Path], made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives what it gives without, measured or not, up to a length."""
    path = variant("qwen2-tied")
    plain = local_runner(path)
    plain.add(0, PROMPT, Sampling())
    by_torch = [plain.step().sequences[0].choice for _ in range(5)]
    assert not made
    monkeypatch.setattr(products, "WORTH", 0)
    monkeypatch.setattr(cpu_pass, "_use", cpu_pass._use)  # as it was, afterwards
    monkeypatch.setattr(products, "LONGEST", len(PROMPT) + 3)
    heavy = local_runner(path)
    runs = []
    for measured in (True, False):
        heavy.reset(CORRECT)
        heavy.watch(CapturePolicy(statistics=measured))
        heavy.add(0, PROMPT, Sampling())
        found, multiplied = [], []
        for _ in range(5):
            found.append(heavy.step())
            multiplied.append(len(made))
            made.clear()
        each = 4 * heavy.model.num_layers + 1  # q, k and v in one, o, gate and up in one, down; and the head
        # The prompt, three tokens, and one of too many behind it.
        assert multiplied == [0, each, each, each, 0]
        runs.append([step.sequences[0].choice for step in found])
    for one, right in zip([*runs[0], *runs[1]], by_torch * 2, strict=True):
        assert one.top_ids == right.top_ids
        np.testing.assert_allclose(one.top_logits, right.top_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [{"dtype": "bfloat16"}, {"batch_invariant": True}, {"max_sequences": 9}],
    ids=["of 16 bits", "batch invariant", "for many"],
)
def test_other_engines_go_as_before(
    config: dict[str, object], variant: Callable[[str], Path], made: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "WORTH", 0)
    monkeypatch.setattr(cpu_pass, "_use", cpu_pass._use)  # as it was, afterwards
    runner = local_runner(variant("qwen2-tied"), **config)
    runner.add(0, PROMPT, Sampling())
    for _ in range(2):
        runner.step()
    assert not made
