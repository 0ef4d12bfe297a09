"""A paged engine as small as can be, on a model of transformers, with what makes caches hard: blocks that requests
share by the tokens in them, chunks of prompts, preemption, drafts, padding, windows and states.

    python paged.py MODEL [--no-prefix] [--whole] [--one] [--roomy] [--no-drafts]

Each option takes one of these away. PLANTED names a bug of `plants`. It records itself for `lockstep attach`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from lockstep.workbench.attach.inside.lockstep_modules import attach
from lockstep.workbench.attach.inside.lockstep_names import TRANSFORMERS
from lockstep.workbench.attach.inside.lockstep_tap import Tape

SIZE = 4  # rows a block
PAD = 4  # a pass is filled up to a multiple of so many rows
DRAFTS = 2
LONG = [3 + (7 * at * at + 11 * at) % 121 for at in range(22)]
#: The first tokens of LONG, and others from the middle of a block on.
ALIKE = [*LONG[:2], *range(60, 73)]
#: The second and third block of LONG, behind the first of ALIKE.
MOVED = [*ALIKE[:4], *LONG[4:12], 50, 51, 52]
CROWD = [[70 + 17 * one + at for at in range(13)] for one in range(3)]
BATCHES = [[LONG, LONG[9:17]], [LONG[:16]], [ALIKE], [MOVED], CROWD, [LONG, [*LONG[:18], 40, 41]]]


@dataclass
class Settings:
    """How it runs: `chunk` rows a pass at most, `together` requests, `blocks` of each pool."""

    prefix: bool = True
    chunk: int = 6
    together: int = 4
    blocks: int = 9
    drafts: bool = True
    emits: int = 6


@dataclass(eq=False)
class Request:
    """`tokens` are its prompt and what it has emitted; the first `computed` have rows. `tables` are by group, `keys`
    name its full blocks; `cached`: how many rows came from the cache, until that is reported. `drafts` follow."""

    name: str
    tokens: list[int]
    stop: int
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    cached: int = 0
    state: Any = None


class Pool:
    """The blocks of a group, from 1 on: 0 is nobody's."""

    def __init__(self, count: int) -> None:
        self.free = deque(range(1, count))
        self.users: Counter[int] = Counter()
        self.known: dict[int, int] = {}  # by key
        self.keys: dict[int, int] = {}  # by block

    def take(self) -> int:
        """A block that nobody uses, which is known no more."""
        block = self.free.popleft()
        self.forget(block)
        self.users[block] = 1
        return block

    def forget(self, block: int) -> None:
        key = self.keys.pop(block, None)
        if key is not None and self.known.get(key) == block:
            del self.known[key]

    def share(self, block: int) -> None:
        """One user more."""
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def release(self, block: int) -> None:
        """One user fewer; what it holds stays known."""
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)

    def key(self, parent: int, tokens: Sequence[int]) -> int:
        """What a block of these tokens behind others is found by."""
        return hash((parent, tuple(tokens)))

    def learn(self, block: int, key: int) -> None:
        if key not in self.known:
            self.known[key], self.keys[block] = block, key


@dataclass(eq=False)
class Group:
    """Layers with one block table: `keys` and `values` of each, [slots, heads, head_dim]."""

    layers: list[int]
    window: int | None
    pool: Pool
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Batch:
    """One pass: the rows of each request, one behind the other, and of each group the slots of all rows."""

    plan: list[tuple[Request, int]]
    ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tables: list[list[list[int]]] = field(default_factory=list)

    @property
    def starts(self) -> list[int]:
        return [sum(count for _, count in self.plan[:at]) for at in range(len(self.plan))]


class Engine:
    """The model, its cache and its requests."""

    def __init__(self, folder: str, settings: Settings, tape: Tape | None = None) -> None:
        AttentionInterface.register(
            "paged", lambda module, *args, **named: self.attention(module, *args, **named)
        )
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="paged", dtype=torch.float32
        )
        self.config, self.settings, self.tape = self.model.config.get_text_config(), settings, tape
        kinds = (
            getattr(self.config, "layer_types", None) or ["full_attention"] * self.config.num_hidden_layers
        )
        self.hybrid = "linear_attention" in kinds
        of_kind = {kind: [at for at, one in enumerate(kinds) if one == kind] for kind in sorted(set(kinds))}
        self.groups = [
            Group(
                layers,
                self.config.sliding_window if kind == "sliding_attention" else None,
                Pool(settings.blocks),
            )
            for kind, layers in of_kind.items()
            if kind != "linear_attention"
        ]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.batch = Batch([])
        self.states: dict[int, Any] = {}  # by the key of the block behind which it is that of
        if tape is not None:
            attach(self.model, tape, TRANSFORMERS)

    # What is run next.

    def schedule(self) -> Batch:
        """The rows of the next pass: requests that run first, then those that wait."""
        room = self.settings.chunk
        plan: list[tuple[Request, int]] = []
        for one in list(self.running):
            if one in self.running and (count := min(self.left(one), room)) and self.has_blocks(one, count):
                plan.append((one, count))
                room -= count
        while self.waiting and room and len(self.running) < self.settings.together:
            one = self.waiting[0]
            self.begin(one)
            count = min(self.left(one), room)
            if not self.enough(one, count):
                self.end(one)
                break
            self.has_blocks(one, count)
            self.running.append(self.waiting.pop(0))
            plan.append((one, count))
            room -= count
        plan = [(one, count) for one, count in plan if one in self.running]
        return self.laid_out(Batch(plan[:1] if self.hybrid else plan))

    def left(self, one: Request) -> int:
        """How many of its tokens have no row."""
        return len(one.tokens) + len(one.drafts) - one.computed

    def begin(self, one: Request) -> None:
        """Find its beginning in the cache, all but the last token at most."""
        one.tables = [[] for _ in self.groups]
        one.computed = one.cached = 0
        blocks = self.found(one) if self.settings.prefix else []
        for group, table, known in zip(self.groups, one.tables, zip(*blocks, strict=True), strict=False):
            for block in known:
                group.pool.share(block)
            table += known
        one.computed = one.cached = len(blocks) * SIZE
        self.begin_state(one)

    def found(self, one: Request) -> list[tuple[int, ...]]:
        """The blocks of all groups that hold its beginning."""
        blocks, key, best = list[tuple[int, ...]](), 0, 0
        for stop in range(SIZE, self.reusable(one) + 1, SIZE):
            key = self.groups[0].pool.key(key, one.tokens[stop - SIZE : stop])
            known = [group.pool.known.get(key) for group in self.groups]
            if None in known:
                break
            blocks.append(tuple(block for block in known if block is not None))
            if not self.hybrid or key in self.states:
                best = len(blocks)
        return blocks[:best]

    def reusable(self, one: Request) -> int:
        """How many of its tokens may come from the cache: the last has to be computed, for its logits."""
        return len(one.tokens) - 1

    def begin_state(self, one: Request) -> None:
        """The states of the layers that have one, as they were behind the tokens from the cache."""
        if self.hybrid:
            one.state = deepcopy(self.states[self.keys(one)[-1]]) if one.computed else self.empty_state()

    def empty_state(self) -> Any:
        cache = DynamicCache(config=self.config)
        for layer in cache.layers:  # keys and values are in the blocks
            if hasattr(layer, "keys"):
                layer.update = lambda keys, values, *args, **named: (keys, values)  # type: ignore[method-assign]
        return cache

    def keys(self, one: Request) -> list[int]:
        """The keys of its blocks that are full."""
        found, key = list[int](), 0
        for stop in range(SIZE, one.computed + 1, SIZE):
            key = self.groups[0].pool.key(key, one.tokens[stop - SIZE : stop])
            found.append(key)
        return found

    def enough(self, one: Request, count: int) -> bool:
        needed = -(-(one.computed + count) // SIZE)
        return all(
            len(group.pool.free) >= needed - len(table)
            for group, table in zip(self.groups, one.tables, strict=True)
        )

    def has_blocks(self, one: Request, count: int) -> bool:
        """Blocks for so many rows more; requests that came later lose theirs, it too if it is the last."""
        while not self.enough(one, count):
            last = self.running[-1]
            self.preempt(last)
            if last is one:
                return False
        for group, table in zip(self.groups, one.tables, strict=True):
            while len(table) * SIZE < one.computed + count:
                table.append(group.pool.take())
        return True

    def preempt(self, one: Request) -> None:
        """It begins again when there is room."""
        self.running.remove(one)
        self.end(one)
        one.drafts = []
        self.waiting.insert(0, one)

    def end(self, one: Request) -> None:
        """Its blocks are free, the last first."""
        for group, table in zip(self.groups, one.tables, strict=True):
            for block in reversed(table):
                group.pool.release(block)
        one.tables, one.state = [[] for _ in self.groups], None

    # One pass.

    def laid_out(self, batch: Batch) -> Batch:
        """Where each row is, and what is read."""
        for one, count in batch.plan:
            batch.ids += [*one.tokens, *one.drafts][one.computed : one.computed + count]
            batch.places += self.places(one, count)
            batch.positions += self.positions(one, count)
            batch.lengths.append(one.computed + count)
        batch.tables = [[one.tables[group] for one, _ in batch.plan] for group in range(len(self.groups))]
        batch.slots = [
            [
                self.slot(table, place)
                for (one, count), table in zip(batch.plan, tables, strict=True)
                for place in self.places(one, count)
            ]
            for tables in batch.tables
        ]
        return self.padded(batch)

    def places(self, one: Request, count: int) -> list[int]:
        return list(range(one.computed, one.computed + count))

    def positions(self, one: Request, count: int) -> list[int]:
        """What the model is given."""
        return self.places(one, count)

    def slot(self, table: list[int], place: int) -> int:
        return table[place // SIZE] * SIZE + place % SIZE

    def padded(self, batch: Batch) -> Batch:
        """Filled up with rows that are written nowhere."""
        more = 0 if self.hybrid else -len(batch.ids) % PAD
        batch.ids += [0] * more
        batch.positions += [0] * more
        for slots in batch.slots:
            slots += self.padding(slots, more)
        return batch

    def padding(self, slots: list[int], more: int) -> list[int]:
        return [-1] * more

    def run(self, batch: Batch) -> None:
        """Compute it, and give each request what its logits chose."""
        self.batch = batch
        self.write(batch)
        ids = torch.tensor([batch.ids])
        state = batch.plan[0][0].state if self.hybrid else None
        with torch.inference_mode():
            hidden = self.model.model.forward(
                input_ids=ids, position_ids=torch.tensor([batch.positions]), past_key_values=state,
                use_cache=self.hybrid,
            ).last_hidden_state[0]  # fmt: skip
            rows = self.asked(batch)
            logits = F.linear(self.gathered(hidden, rows), self.model.lm_head.weight)
        if self.tape is not None:
            self.tape.tap("logits", logits, "replicate", rows)
            self.tape.end()
        chosen = dict(zip(rows, logits.argmax(-1).tolist(), strict=True))
        for (one, count), start in zip(batch.plan, batch.starts, strict=True):
            self.accept(one, count, [chosen.get(row, -1) for row in range(start, start + count)])

    def asked(self, batch: Batch) -> list[int]:
        """The rows whose logits are needed: that of the last token, and of drafts behind it."""
        return [
            start + row
            for (one, count), start in zip(batch.plan, batch.starts, strict=True)
            for row in range(count)
            if one.computed + row >= len(one.tokens) - 1
        ]

    def gathered(self, hidden: Tensor, rows: list[int]) -> Tensor:
        return hidden[rows]

    def accept(self, one: Request, count: int, chosen: list[int]) -> None:
        """A token, and more where drafts are what the logits chose; the rows of others are taken back."""
        size = len(one.tokens)
        if one.computed + count < size:
            one.computed += count
            self.remember(one)
            return
        reported = chosen[size - 1 - one.computed :]
        right = 0
        while right < len(one.drafts) and one.drafts[right] == reported[right]:
            right += 1
        one.tokens += reported[: right + 1]
        self.counted(one, size + right, count)
        one.drafts = self.drafted(one) if self.settings.drafts else []
        self.remember(one)
        if len(one.tokens) >= one.stop:
            one.tokens = one.tokens[: one.stop]
            self.running.remove(one)
            self.end(one)

    def counted(self, one: Request, right: int, count: int) -> None:
        """The rows that stay."""
        one.computed = right

    def drafted(self, one: Request) -> list[int]:
        """What came after the same token before; else the numbers that follow."""
        room = one.stop - len(one.tokens) - 1
        last = one.tokens[-1]
        for at in range(len(one.tokens) - 2, -1, -1):
            if one.tokens[at] == last:
                return one.tokens[at + 1 : at + 1 + min(DRAFTS, room)]
        return [(last + 1 + at) % self.config.vocab_size for at in range(min(DRAFTS, room))]

    def remember(self, one: Request) -> None:
        """Its full blocks can be found again, and, where it stands behind one, its state."""
        keys = self.keys(one)
        for group, table in zip(self.groups, one.tables, strict=True):
            for key, block in zip(keys, table, strict=False):
                group.pool.learn(block, key)
        if self.hybrid and keys and one.computed % SIZE == 0:
            self.states[keys[-1]] = deepcopy(one.state)

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Of [1, heads, rows, head_dim]: the rows are written, and each request reads its own."""
        layer = module.layer_idx
        number, group = next((at, one) for at, one in enumerate(self.groups) if layer in one.layers)
        for held, new in ((group.keys, key), (group.values, value)):
            if layer not in held:
                held[layer] = torch.zeros(self.settings.blocks * SIZE, new.shape[1], new.shape[3])
            for row, slot in enumerate(self.batch.slots[number]):
                if slot >= 0:
                    held[layer][slot] = new[0, :, row]
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for at, ((one, count), start) in enumerate(zip(self.batch.plan, self.batch.starts, strict=True)):
            table, length = self.batch.tables[number][at], self.batch.lengths[at]
            slots = [self.read_slot(group, one, table, place) for place in range(length)]
            keys, values = (held[layer][slots].repeat_interleave(query.shape[1] // key.shape[1], 1)
                            for held in (group.keys, group.values))  # fmt: skip
            rows = torch.arange(length - count, length)[:, None] + self.mask_offset(one)
            seen = torch.arange(length)[None] <= rows
            if group.window is not None:
                seen &= torch.arange(length)[None] > rows - group.window
            scores = torch.einsum("hqd,khd->hqk", query[0, :, start : start + count], keys) * scaling
            probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[0, start : start + count] = torch.einsum("hqk,khd->qhd", probs, values)
        return out, None

    def mask_offset(self, one: Request) -> int:
        """By how much the rows of a request see more than those before them."""
        return 0

    def read_slot(self, group: Group, one: Request, table: list[int], place: int) -> int:
        return self.slot(table, place)

    def write(self, batch: Batch) -> None:
        """The tape of the pass."""
        if self.tape is None:
            return
        count = sum(count for _, count in batch.plan)
        names = [one.name for one, count in batch.plan for _ in range(count)]
        padding = [""] * (len(batch.ids) - count)
        self.tape.step([batch.ids], [batch.positions], names + padding, [batch.places + [0] * len(padding)])
        requests = [
            {
                "request": one.name, "rows": rows, "computed": one.computed,
                "cached": one.tokens[: one.cached] if one.cached == one.computed else [],
            }
            for one, rows in batch.plan
        ]  # fmt: skip
        groups = [
            {
                "layers": group.layers, "block_size": SIZE, "window": group.window, "slots": slots[:count],
                "padding": slots[count:], "lengths": batch.lengths,
                "blocks": [
                    list(table[: -(-length // SIZE)]) for table, length in zip(tables, batch.lengths, strict=True)
                ],
            }
            for group, slots, tables in zip(self.groups, batch.slots, batch.tables, strict=True)
        ]  # fmt: skip
        self.tape.cache({"requests": requests, "groups": groups})

    def generate(self, prompts: Sequence[Sequence[int]], first: int) -> list[list[int]]:
        """What each prompt goes on with."""
        asked = [
            Request(str(first + at), list(ids), len(ids) + self.settings.emits)
            for at, ids in enumerate(prompts)
        ]
        self.waiting += asked
        while self.waiting or self.running:
            self.run(self.schedule())
        return [one.tokens[len(ids) :] for one, ids in zip(asked, prompts, strict=True)]


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for word in ("--no-prefix", "--whole", "--one", "--roomy", "--no-drafts"):
        parser.add_argument(word, action="store_true")
    asked = parser.parse_args(words)
    settings = Settings(
        prefix=not asked.no_prefix, drafts=not asked.no_drafts,
        **{name: 10_000 for name in ("chunk",) if asked.whole},
        **{name: 1 for name in ("together",) if asked.one},
        **{name: 200 for name in ("blocks",) if asked.roomy},
    )  # fmt: skip
    folder, tape = os.environ.get("LOCKSTEP_TAP"), None
    if folder:
        config = AutoModelForCausalLM.from_pretrained(asked.model).config
        tape = Tape(
            folder,
            engine="paged",
            model=asked.model,
            config=config,
            capture=os.environ["LOCKSTEP_TAP_CAPTURE"],
        )
    engine = Engine(asked.model, settings, tape)
    if planted := os.environ.get("PLANTED"):
        sys.path.insert(0, str(Path(__file__).parent))
        import plants

        plants.PLANTS[planted](engine)
    count = 0
    for batch in BATCHES:
        for tokens in engine.generate(batch, count):
            print("tokens", tokens)
        count += len(batch)
    if tape is not None:
        tape.close()


if __name__ == "__main__":
    main(sys.argv[1:])
