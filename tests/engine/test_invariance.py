"""What may not change the result: attention's path, chunks, the batch, block sizes, going back, the cache
itself. One rank in this process; numbers that take another route through the same arithmetic agree to
rounding, those that take the same route agree to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.engine.errors import RequestError
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.run.sequences import StepResult
from lockstep.engine.taps.hub import CapturePolicy
from tests.checkpoints import VARIANTS
from tests.engine.harness import local_runner

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]  # longer than the tiny windows (8)
OTHERS = ([9, 9, 8], [100, 2, 45, 61, 13, 7, 7])
ROUNDING = 2e-5  # of logits up to ~6, in float32


def captured(runner: Runner, result: StepResult, tap: str, seq: int = 0) -> torch.Tensor:
    """What a pass captured of one sequence at a tap."""
    (found,) = (c.tensor for c in result.captured if (c.tap, c.seq) == (runner.hub.places[tap], seq))
    return found


def logits(runner: Runner, passes: int, seq: int = 0) -> torch.Tensor:
    """[passes, vocab] of one sequence's emitting passes."""
    rows: list[torch.Tensor] = []
    while len(rows) < passes:
        result = runner.step()
        if next(s for s in result.sequences if s.seq == seq).emitted is not None:
            rows.append(captured(runner, result, "logits", seq)[0])
    return torch.stack(rows)


def runner_with(
    path: Path,
    *prompts: Sequence[int],
    statistics: bool = False,
    taps: Sequence[str] = ("logits",),
    **config: object,
) -> Runner:
    """A runner with sequences 0, 1, … and some taps captured."""
    runner = local_runner(path, **config)
    runner.watch(CapturePolicy(statistics, {runner.hub.places[tap]: "full" for tap in taps}))
    for seq, ids in enumerate(prompts):
        runner.add(seq, list(ids), Sampling())
    return runner


@pytest.mark.parametrize("name", VARIANTS)
def test_both_paths_through_attention_agree(name: str, variant: Callable[[str], Path]) -> None:
    fused = logits(runner_with(variant(name), PROMPT), 6)
    explicit = logits(runner_with(variant(name), PROMPT, statistics=True), 6)
    assert (fused - explicit).abs().max() <= ROUNDING


@pytest.mark.parametrize("chunk", [1, 5, 12, 13])
@pytest.mark.parametrize("name", ["qwen2-window", "qwen3", "llama-yarn"])
def test_a_chunked_prefill_is_a_whole_one(name: str, chunk: int, variant: Callable[[str], Path]) -> None:
    whole = runner_with(variant(name), PROMPT)
    chunked = runner_with(variant(name), PROMPT, chunk_tokens=chunk)
    expected, found = logits(whole, 4), logits(chunked, 4)
    assert (found - expected).abs().max() <= ROUNDING
    assert chunked.comm.step == -(-len(PROMPT) // chunk) + 3
    assert chunked.sequences[0].ids == whole.sequences[0].ids


@pytest.mark.parametrize("name", ["qwen2-tied", "mistral-window"])
def test_a_sequence_does_not_notice_its_batch(name: str, variant: Callable[[str], Path]) -> None:
    together = runner_with(variant(name), PROMPT, *OTHERS)
    passes = [together.step() for _ in range(5)]
    for seq, ids in enumerate((PROMPT, *OTHERS)):
        alone = logits(runner_with(variant(name), ids), 5)
        found = torch.stack([captured(together, one, "logits", seq)[0] for one in passes])
        assert (found - alone).abs().max() <= ROUNDING


def test_sequences_that_join_late_and_leave_early_disturb_nobody(variant: Callable[[str], Path]) -> None:
    expected = logits(runner_with(variant("qwen3"), PROMPT), 6)
    runner = runner_with(variant("qwen3"), OTHERS[0])
    runner.step()
    runner.add(7, PROMPT, Sampling())
    found = [logits(runner, 2, seq=7)]  # a prefill beside a decode step
    runner.remove(0)
    runner.add(3, list(OTHERS[1]), Sampling())  # in the blocks that were just given back
    found.append(logits(runner, 4, seq=7))
    assert (torch.cat(found) - expected).abs().max() <= ROUNDING
    runner.blocks.check_integrity()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-window"])
def test_the_block_size_changes_no_bit(name: str, variant: Callable[[str], Path]) -> None:
    def run(size: int) -> np.ndarray:
        runner = runner_with(variant(name), PROMPT, OTHERS[1], statistics=True, block_size=size)
        return np.stack([runner.step().checksums for _ in range(5)])

    expected = run(16)
    for size in (1, 3, 64, 256):
        assert (run(size) == expected).all(), size


def test_decoding_is_a_prefill_of_all_tokens_so_far(variant: Callable[[str], Path]) -> None:
    runner = runner_with(variant("qwen2-window"), PROMPT)
    cached = logits(runner, 12)
    ids = runner.sequences[0].ids
    for step in (1, 4, 11):
        again = logits(runner_with(variant("qwen2-window"), ids[: len(PROMPT) + step]), 1)[0]
        assert (again - cached[step]).abs().max() <= ROUNDING


def test_a_later_token_does_not_move_what_came_before(variant: Callable[[str], Path]) -> None:
    taps = ["layers.2.attn.k_rope", "layers.2.mlp_residual", "layers.2.attn.probs"]
    changed = [*PROMPT[:9], 66, *PROMPT[10:]]
    before, after = (runner_with(variant("qwen2-tied"), ids, taps=taps) for ids in (PROMPT, changed))
    first, second = before.step(), after.step()
    for tap in taps:
        rows = slice(0, 9)
        one, two = captured(before, first, tap), captured(after, second, tap)
        one, two = (x.transpose(0, 1) if tap.endswith("probs") else x for x in (one, two))
        assert (one[rows] == two[rows]).all(), tap
        assert (one[9] != two[9]).any(), tap


@pytest.mark.parametrize("back_to", [1, 4])
def test_going_back_and_on_again_changes_no_bit(back_to: int, variant: Callable[[str], Path]) -> None:
    runner = runner_with(variant("qwen2-tied"), PROMPT, OTHERS[0], statistics=True, block_size=4)
    first = [runner.step() for _ in range(7)]
    used = [one.used_blocks for one in first]
    kept = {seq: (size + back_to, size + back_to - 1, size + back_to - 1) for seq, size in ((0, 13), (1, 3))}
    runner.rewind(kept, back_to)
    again = [runner.step() for _ in range(7 - back_to)]
    for old, new in zip(first[back_to:], again, strict=True):
        assert (old.checksums == new.checksums).all()
        assert [s.ids for s in old.sequences] == [s.ids for s in new.sequences]
    assert [one.used_blocks for one in again] == used[back_to:]


def test_going_back_to_the_start_runs_the_prompt_again(variant: Callable[[str], Path]) -> None:
    runner = runner_with(variant("qwen3"), PROMPT, statistics=True)
    first = runner.step().checksums
    runner.step()
    runner.rewind({0: (len(PROMPT), 0, 0)}, 0)
    assert runner.blocks.used == 0
    assert (runner.step().checksums == first).all()


@pytest.mark.parametrize("name", ["qwen2-tied", "llama", "llama-mha"])
def test_the_cache_holds_kv_heads_only_and_one_row_a_position(
    name: str, variant: Callable[[str], Path]
) -> None:
    runner = runner_with(variant(name), PROMPT, taps=["layers.1.attn.k_cache", "layers.1.attn.k_rope"])
    model = runner.model
    assert runner.pool.keys[1].shape[1:] == (model.num_kv_heads, model.head_dim)
    rows = []
    for step in range(4):
        result = runner.step()
        rows.append(captured(runner, result, "layers.1.attn.k_rope"))
        reported = result.sequences[0]
        assert reported.kv_len == reported.expected_kv_len == len(PROMPT) + step == reported.positions[-1] + 1
        # What is attended to is what was projected, step after step.
        assert (captured(runner, result, "layers.1.attn.k_cache") == torch.cat(rows)).all()


def state(runner: Runner) -> object:
    """All that may not move when a pass is refused."""
    sequences = {s.id: (list(s.ids), s.computed, s.kv_len, list(s.held)) for s in runner.sequences.values()}
    return sequences, {seq: list(table) for seq, table in runner.blocks.tables.items()}, runner.comm.step


def test_without_free_blocks_a_pass_is_refused_and_nothing_moves(variant: Callable[[str], Path]) -> None:
    runner = runner_with(variant("qwen2-tied"), PROMPT, OTHERS[0], block_size=4, num_blocks=6)
    for _ in range(4):
        runner.step()  # 16 + 6 tokens: 4 + 2 blocks, all there are
    before = state(runner)
    with pytest.raises(
        RequestError, match=r"the KV cache is full: 1 more block.* 0 of 6 free.*or more blocks"
    ):
        runner.step()
    assert state(runner) == before
    runner.remove(1)
    assert runner.step().used_blocks == 5
    runner.blocks.check_integrity()


def test_the_end_of_the_context_is_refused_and_nothing_moves(variant: Callable[[str], Path]) -> None:
    runner = runner_with(variant("qwen2-tied"), PROMPT, max_tokens=len(PROMPT) + 1)
    runner.step()
    runner.step()
    before = state(runner)
    with pytest.raises(RequestError, match=r"sequence 0 has reached the end of its context \(14 tokens\)"):
        runner.step()
    assert state(runner) == before


def test_a_pass_that_breaks_off_gives_its_blocks_back(
    variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_with(variant("qwen2-tied"), PROMPT, OTHERS[0], statistics=True, block_size=2)
    expected = [runner.step().checksums for _ in range(4)]
    runner.reset(runner.rules)
    for seq, ids in enumerate((PROMPT, OTHERS[0])):
        runner.add(seq, list(ids), Sampling())
    found = []
    for _ in range(4):
        before, free = state(runner), list(runner.blocks._free)
        with monkeypatch.context() as broken:
            broken.setattr(runner.decoder.head, "tap", lambda x: 1 / 0)
            with pytest.raises(ArithmeticError):
                runner.step()
        tables = {seq: list(table) for seq, table in runner.blocks.tables.items() if table}
        assert (state(runner)[0], tables) == before[:2]
        assert list(runner.blocks._free) == free
        found.append(runner.step().checksums)
    assert (np.stack(found) == np.stack(expected)).all()
