"""Calls of transformers' models: which request each row continues, and how many tokens it has before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MistralConfig, StaticCache

from lockstep.workbench.attach.inside.lockstep_calls import CallInputs

CONFIG = MistralConfig(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, sliding_window=4
)
CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": DynamicCache,
    "windows": lambda: DynamicCache(config=CONFIG),
    "static": lambda: StaticCache(config=CONFIG, max_cache_len=32),
}


def filled(cache: Any, count: int) -> Any:
    """The cache after the rows of a call."""
    for layer in range(2):
        cache.update(torch.zeros(1, 1, count, 8), torch.zeros(1, 1, count, 8), layer)
    return cache


def reported(calls: CallInputs, ids: list[list[int]], cache: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The request and the place of each row of a call."""
    found = calls((), {"input_ids": torch.tensor(ids), "cache": cache, **kwargs})
    assert found is not None
    places = found[3]
    return found[2], None if places is None else places.expand(len(ids), len(ids[0])).flatten().tolist()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_reports_positions_by_either_of_its_names(name: str) -> None:
    """transformers 5.24 renamed the argument; engines of others keep to the older name."""
    found = CallInputs()((), {"input_ids": torch.tensor([[5]]), name: filled(DynamicCache(), 7)})
    assert found is not None
    assert found[1] == 7


def test_whole_masks_of_a_static_cache_leave_every_token_in() -> None:
    """`generate` with a static cache hands on a dict of masks [B, 1, T, K], one a kind of layer."""
    masks = {"full_attention": torch.ones(1, 1, 3, 8, dtype=torch.bool)}
    assert reported(CallInputs(), [[5, 6, 7]], None, attention_mask=masks) == (["1.0"] * 3, None)


@pytest.mark.parametrize("kind", CACHES)
def test_places_do_not_depend_on_what_positions_are_given(kind: str) -> None:
    """A chunk of three, one of two, then single tokens past the window: position ids that begin again in each call."""
    calls, cache, read = CallInputs(), CACHES[kind](), 0
    for count in (3, 2, 1, 1):
        found = reported(calls, [[9] * count], cache, position_ids=torch.arange(count)[None])
        assert found == (["1.0"] * count, list(range(read, read + count)))
        filled(cache, count)
        read += count


def test_a_window_that_counts_the_keys_it_keeps_is_seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(filled(CACHES["windows"](), 9), 1)
    monkeypatch.setattr(type(cache.layers[0]), "get_seq_length", lambda self: self.keys.shape[-2])
    assert cache.get_seq_length() == 3
    assert reported(CallInputs(), [[9]], cache)[1] == [10]


def test_padding_in_front_is_no_place() -> None:
    calls, cache = CallInputs(), DynamicCache()
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    names, places = reported(calls, [[0, 0, 5, 17], [9, 8, 7, 6]], cache, attention_mask=mask)
    assert names == ["", "", "1.0", "1.0", "1.1", "1.1", "1.1", "1.1"]
    assert places[2:] == [0, 1, 0, 1, 2, 3]
    longer = torch.cat([mask, mask[:, -1:]], 1)
    assert reported(calls, [[3], [5]], filled(cache, 4), attention_mask=longer) == (["1.0", "1.1"], [2, 4])


def test_a_batch_goes_on_with_its_own_cache() -> None:
    """Two conversations in turn: the second begins before the first goes on."""
    calls, one, other = CallInputs(), DynamicCache(), DynamicCache()
    assert reported(calls, [[5, 6]], one)[0] == ["1.0"] * 2
    assert reported(calls, [[7, 8]], other)[0] == ["2.0"] * 2
    assert reported(calls, [[6]], filled(one, 2)) == (["1.0"], [2])
    assert reported(calls, [[8]], filled(other, 2)) == (["2.0"], [2])


def test_a_cache_that_is_made_inside_a_call_is_of_that_call() -> None:
    calls = CallInputs()
    assert reported(calls, [[5, 6]], None) == (["1.0"] * 2, [0, 1])
    assert reported(calls, [[6]], filled(DynamicCache(), 2)) == (["1.0"], [2])


def test_what_was_taken_back_is_no_longer_before() -> None:
    """A draft of four tokens, of which one stays."""
    calls, cache = CallInputs(), filled(DynamicCache(), 5)
    reported(calls, [[1, 2, 3, 4]], cache)
    filled(cache, 4).crop(-3)
    assert reported(calls, [[7]], cache)[1] == [6]


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": torch.arange(4).expand(3, 1, 4)},  # axes of M-RoPE
        {"attention_mask": torch.ones(1, 1, 4, 4)},  # a tree of drafts, or any other form
        {"attention_mask": torch.ones(1, 9, dtype=torch.long)},  # of tokens that the cache has not seen
    ],
    ids=["axes", "form", "length"],
)
def test_places_are_not_stated_where_they_are_not_known(given: dict[str, Any]) -> None:
    assert reported(CallInputs(), [[5, 6, 7, 8]], None, **given)[1] is None


@pytest.mark.parametrize(
    ("given", "texts", "places"),
    [
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}, "00111", [0, 1, 0, 1, 2]),
        ({"position_ids": torch.tensor([[0, 1, 0, 0, 0]])}, "00   ", None),  # filled up: one text
        ({"position_ids": torch.tensor([[0, 0, 1, 0, 0]])}, "011  ", [0, 0, 1, 0, 0]),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 2, 5])}, "01222", [0, 0, 0, 1, 2]),  # of whatever positions
        ({"position_ids": torch.tensor([[0, 0, 1, 0, 1]]), "attention_mask": torch.tensor([[0, 1, 1, 2, 2]])},
         " 0011", [0, 0, 1, 0, 1]),
        ({"position_ids": torch.zeros(1, 5, dtype=torch.long)}, "00000", None),
    ],
)  # fmt: skip
def test_texts_packed_into_a_row_are_requests_of_their_own(
    given: dict[str, Any], texts: str, places: list[int] | None
) -> None:
    names, found = reported(CallInputs(), [[5, 6, 7, 8, 9]], None, **given)
    if places is None:
        assert set(names) == {"1.0"}
    else:
        assert names == [f"1.0.{text}" if text != " " else "" for text in texts]
    assert found == places


def test_a_cache_of_others_reports_no_place() -> None:
    class Cache:
        def get_seq_length(self) -> int:
            return 7

    cache = Cache()
    assert reported(CallInputs(), [[5]], cache) == (["0.0"], None)
    assert reported(CallInputs(), [[5]], copy.copy(cache)) == (["0.0"], None)
