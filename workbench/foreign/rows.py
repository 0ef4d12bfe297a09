"""Where each row of each pass goes: request by request and position by position, however passes were packed.

A request's prompt is step 0 (its chunks joined), then each token is a step. Of a row that was computed twice the last
counts. A row that a request takes from a prefix cache is the one that was computed for it: it goes to both. What
belongs nowhere is counted by kind: nothing is left out silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.workbench.foreign.cached import CachedPrefixes
from lockstep.workbench.foreign.heads import PassHead
from lockstep.workbench.foreign.naming import named_rows
from lockstep.workbench.foreign.passes import ForeignDumpError


@dataclass(frozen=True, slots=True)
class RowPlace:
    """A row of the session: the `row`-th of sequence `seq` at `step`."""

    seq: int
    step: int
    row: int


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A request of the run: the tokens that it read, of which the first `prompt` are its prompt; `chosen` is what the
    logits of its last row chose. `greedy` are the positions whose next token is the likeliest by their logits, where
    the dump reports on any."""

    name: str
    ids: tuple[int, ...]
    prompt: int
    chosen: int | None
    greedy: frozenset[int] = frozenset()

    @property
    def steps(self) -> int:
        """Steps that feed it."""
        return len(self.ids) - self.prompt + 1

    def span(self, step: int) -> range:
        """The positions that a step computes."""
        return range(self.prompt) if step == 0 else range(self.prompt + step - 1, self.prompt + step)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """`names[pass]` are the requests of its rows, `places[pass][row]` is where that row goes: to its own sequence, and
    to those that have it from a prefix cache. `dropped` counts those that go nowhere, by why. `inferred`: the dump
    names no requests. `shared` rows come from a prefix cache; `unknown` of them were not computed for these tokens."""

    sequences: tuple[PlannedSequence, ...]
    names: Mapping[int, tuple[str, ...]]
    places: tuple[Mapping[int, Sequence[RowPlace]], ...]
    dropped: Mapping[str, int]
    inferred: bool
    shared: int = 0
    unknown: int = 0

    @property
    def steps(self) -> int:
        """Steps of the session."""
        return max(one.steps for one in self.sequences)

    @property
    def rows(self) -> int:
        """Rows that the session has."""
        return sum(len(one.ids) for one in self.sequences)


@dataclass(slots=True)
class _Request:
    """The rows of one request so far: for each position its token, where it was computed last (None: what it has from a
    prefix cache was not computed for it), in which pass first and with how many rows of the request, whether its token
    is what the row before chose, and what its own logits chose (None: there are none)."""

    name: str
    ids: list[int] = field(default_factory=list)
    at: list[tuple[int, int] | None] = field(default_factory=list)
    began: list[tuple[int, int]] = field(default_factory=list)
    expected: list[bool | None] = field(default_factory=list)
    choices: list[int | None] = field(default_factory=list)
    lacking: bool = False  # a row was lost: nothing after it can be used
    shared: int = 0  # the first, which come from a prefix cache
    shifts: set[int] = field(default_factory=set)  # by how much positions exceed places

    @property
    def chosen(self) -> int | None:
        """What the logits of the last row chose."""
        return self.choices[-1] if self.choices else None

    def share(self, number: int, tokens: Sequence[int], sources: Sequence[tuple[int, int] | None]) -> None:
        """Begin with rows of a prefix cache, in pass `number`."""
        self.shared = len(tokens)
        self.ids, self.at = list(tokens), list(sources)
        self.began, self.expected = [(number, 2)] * len(tokens), [None] * len(tokens)  # no row of decode
        self.choices = [None] * len(tokens)


def planned(heads: Sequence[PassHead], eos: Sequence[int] = ()) -> RowPlan:
    """Place every row. ForeignDumpError where no request is left, or a row cannot be shown to be one's."""
    dropped: Counter[str] = Counter()
    used = [_without_profiling(head, dropped) for head in heads]
    inferred = all(head.requests is None for head in heads)
    kept = [number for number, one in enumerate(used) if one]
    names = dict(zip(kept, named_rows([heads[number] for number in kept], eos), strict=True)) if inferred else {
        number: heads[number].requests or ("",) * len(heads[number].ids) for number in kept
    }  # fmt: skip
    requests: list[_Request] = []
    prefixes = CachedPrefixes.of(heads)
    for number in kept:
        _read(number, heads[number], names[number], requests, dropped, prefixes)
        prefixes.follow(number, heads[number])
    whole = [
        one
        for one in requests
        if one.at and not _left_out(one, requests, heads, inferred, dropped) and not _shifted(one, dropped)
    ]
    if not whole:
        why = ", ".join(f"{count} {what}" for what, count in dropped.items())
        raise ForeignDumpError(
            f"no request was recorded from its first token on ({why or 'no pass has a row'})"
        )
    sequences = tuple(
        PlannedSequence(one.name, tuple(one.ids), _prompt(one), one.chosen, _greedy(one, heads, names))
        for one in whole
    )
    places: list[dict[int, list[RowPlace]]] = [{} for _ in heads]
    for seq, (one, plan) in enumerate(zip(whole, sequences, strict=True)):
        for position, source in enumerate(one.at):
            step = max(0, position - plan.prompt + 1)
            if source is not None:
                number, row = source
                places[number].setdefault(row, []).append(RowPlace(seq, step, position if step == 0 else 0))
    unknown = sum(source is None for one in whole for source in one.at)
    shared = sum(one.shared for one in whole)
    return RowPlan(sequences, names, tuple(places), dict(dropped), inferred, shared, unknown)


def _greedy(one: _Request, heads: Sequence[PassHead], names: Mapping[int, Sequence[str]]) -> frozenset[int]:
    """The positions of a request whose next token was chosen greedily: each the last row of a pass that reports it."""
    return frozenset(
        position
        for position, source in enumerate(one.at)
        if source is not None
        and one.name in (heads[source[0]].greedy or ())
        and one.name not in names[source[0]][source[1] + 1 :]
    )


#: Why rows are dropped.
PROFILING, PADDING, REPEATED = "profiling rows", "padding rows", "rows computed again later"
REJECTED, UNFINISHED = "rows whose token was taken back", "rows without those before them"
SHIFTED = "rows of requests that begin at another position than 0"


def _without_profiling(head: PassHead, dropped: Counter[str]) -> bool:
    """Whether the pass is one of the run; else its rows are counted."""
    if head.ids and (any(head.requests) if head.requests is not None else not head.blank):
        return True
    dropped[PROFILING] += len(head.ids)
    return False


def _read(
    number: int,
    head: PassHead,
    names: Sequence[str],
    requests: list[_Request],
    dropped: Counter[str],
    prefixes: CachedPrefixes,
) -> None:
    together, chosen = Counter(names), head.chosen(names)
    latest = {one.name: one for one in requests}
    for row, name in enumerate(names):
        if not name:
            dropped[PADDING] += 1
            continue
        one = latest.get(name)
        if one is None or (head.places[row] == 0 and not _repeats(one, head, names, row)):
            one = latest[name] = _Request(name)
            requests.append(one)
            if found := prefixes.of_request(name, head):
                one.share(number, *found)
        _place(one, number, row, head, together[name], dropped)
        if head.places[row] == len(one.ids) - 1:
            one.choices[-1] = chosen.get(row)


def _repeats(one: _Request, head: PassHead, names: Sequence[str], row: int) -> bool:
    """Whether a request that begins once more reads what it read before; else its name is given to another."""
    read = [token for token, name in zip(head.ids[row:], names[row:], strict=True) if name == one.name]
    size = min(len(read), len(one.ids))
    return read[:size] == one.ids[:size]


def _place(
    one: _Request, number: int, row: int, head: PassHead, together: int, dropped: Counter[str]
) -> None:
    token, position, size = head.ids[row], head.places[row], len(one.ids)
    one.shifts.add(head.positions[row] - position)
    if position > size or one.lacking:
        one.lacking = True
        dropped[UNFINISHED] += 1
    elif position < size and one.ids[position] == token:
        dropped[REPEATED] += 1
        one.at[position] = (number, row)
    else:
        if size > position:
            dropped[REJECTED] += size - position
            for reported in (one.ids, one.at, one.began, one.expected, one.choices):
                del reported[position:]
        one.expected.append(None if one.chosen is None else one.chosen == token)
        one.choices.append(None)
        one.ids.append(token)
        one.at.append((number, row))
        one.began.append((number, together))


def _left_out(
    one: _Request,
    requests: Sequence[_Request],
    heads: Sequence[PassHead],
    inferred: bool,
    dropped: Counter[str],
) -> bool:
    """A row at position 0 that nothing follows is padding where the dump names no requests: several alike in one pass,
    or token 0 beside requests."""
    if not inferred or len(one.ids) > 1:
        return False
    number = one.began[0][0]
    alike = sum(each.ids == one.ids and each.began[0][0] == number for each in requests)
    if alike < 2 and not (one.ids == [0] and (len(heads[number].ids) > 1 or len(requests) > 1)):
        return False
    dropped[PADDING] += 1
    return True


def _shifted(one: _Request, dropped: Counter[str]) -> bool:
    """Whether all positions of a request are too far by one number, as where padding before it is counted. It turns
    queries and keys alike, so attention stays what it was; no row of it is at the position that it would be judged
    at. Behind rows of a prefix cache, which are at theirs, it is no harmless shift."""
    if len(one.shifts) != 1 or 0 in one.shifts or one.shared:
        return False
    dropped[SHIFTED] += len(one.at)
    return True


def _prompt(one: _Request) -> int:
    """How many tokens of a request are its prompt: those before its first pass of one row. That may still be the last
    of three chunks or more, of one row: then its token is not what the logits chose, in a run that is greedy from there
    on. So may be more of them where an engine reads a prompt token by token. Behind it drafts may come in one pass with
    the token before them: all of these are what the logits chose."""
    least = one.shared + 1  # a prefix cache leaves a token to compute
    first = next((p for p in range(least, len(one.ids)) if one.began[p][1] == 1), len(one.ids))
    drafted = [
        p for p in range(least, first) if one.began[p][0] != one.began[p - 1][0] and all(one.expected[p:])
    ]
    if drafted:
        return drafted[0]
    reported = one.expected[first:]
    one_by_one, chunked = one.began[0][1] == 1, one.began[0][0] != one.began[first - 1][0]
    most = len(reported) if one_by_one else 2 if chunked else 1
    for more in range(1, min(most, len(reported))):
        if True not in reported[:more] and all(reported[more:]):
            return first + more
    return first
