"""The orders in which one engine can run the same requests: together, alone, reversed, preempted, speculated, from a
kept prefix.

Requests are forced onto the same tokens, so that every run computes the same rows. Each schedule leaves a session whose
sequences have the requests' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.workbench.inferior.inferior import Inferior

#: By request the tokens that it emits.
Emitted = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Requests:
    """`prompts`, each of which emits `steps` + 1 tokens: `forced`, or, without these, those that the engine chooses."""

    prompts: tuple[tuple[int, ...], ...]
    steps: int
    forced: Emitted = field(default_factory=dict)


class RequestRun:
    """Requests under way on an engine that has no other sequences."""

    def __init__(self, inferior: Inferior, requests: Requests) -> None:
        self.inferior, self.requests = inferior, requests
        self.emitted: dict[int, list[int]] = {}
        self._running: dict[int, int] = {}  # sequence -> request

    def begin(self, request: int, seq: int | None = None) -> None:
        """A new request; or one that has begun, as another sequence, whose tokens are read anew."""
        reported = self.emitted.setdefault(request, [])
        number = self.inferior.add(
            [*self.requests.prompts[request], *reported], seq=request if seq is None else seq
        )
        self._running[number] = request

    def step(self, otherwise: Callable[[int], int] | None = None) -> None:
        """One pass of all that run. `otherwise` makes other tokens of those that they are forced onto."""
        forced = {}
        for seq, request in self._running.items():
            reported, at = self.requests.forced.get(request), len(self.emitted[request])
            if reported is not None and at < len(reported):
                forced[seq] = reported[at] if otherwise is None else otherwise(reported[at])
        record = self.inferior.step(forced)
        for one in record.sequences:
            if one.emitted is not None:
                self.emitted[self._running[one.seq]].append(one.emitted)

    def end(self, seq: int) -> None:
        """It takes no part any more, and its cache is free again."""
        self.inferior.remove(seq)
        del self._running[seq]

    def finish(self) -> None:
        """Run until every request has emitted all its tokens; each is removed when it has."""
        while self._running:
            self.step()
            for seq, request in list(self._running.items()):
                if self.done(request):
                    self.end(seq)

    def done(self, request: int) -> bool:
        """Whether it has emitted all its tokens."""
        return len(self.emitted[request]) > self.requests.steps

    @property
    def tokens(self) -> Emitted:
        return {request: tuple(reported) for request, reported in self.emitted.items()}


#: Drafts of one pass that are right, and that are wrong, at most.
_RIGHT, _WRONG = 1, 2

Schedule = Callable[[Inferior, Requests], Emitted]


def together(inferior: Inferior, requests: Requests, order: Sequence[int] | None = None) -> Emitted:
    """All in one batch, in this order."""
    run = RequestRun(inferior, requests)
    for request in range(len(requests.prompts)) if order is None else order:
        run.begin(request)
    run.finish()
    return run.tokens


def reversed_order(inferior: Inferior, requests: Requests) -> Emitted:
    """All in one batch, the last first."""
    return together(inferior, requests, range(len(requests.prompts))[::-1])


def alone(inferior: Inferior, requests: Requests) -> Emitted:
    """One after the other, in batches of one."""
    run = RequestRun(inferior, requests)
    for request in range(len(requests.prompts)):
        run.begin(request)
        run.finish()
    return run.tokens


def preempted(inferior: Inferior, requests: Requests) -> Emitted:
    """The first request loses its cache in the middle of its tokens, misses a pass of the others, and is read anew,
    with what it has emitted, as a prompt (vLLM's preemption by recomputation)."""
    run = RequestRun(inferior, requests)
    for request in range(len(requests.prompts)):
        run.begin(request)
    while len(run.emitted[0]) < max(1, (requests.steps + 1) // 2):
        run.step()
    run.end(0)
    if len(requests.prompts) > 1:
        run.step()
    run.begin(0, seq=len(requests.prompts))
    run.finish()
    return run.tokens


def speculated(inferior: Inferior, requests: Requests) -> Emitted:
    """All in one batch, decoded by drafts: a pass verifies right ones with wrong ones behind them, all of which are
    then taken back out of the cache, and another verifies the right ones alone. Of the two the second is recorded."""
    run, recorder, vocabulary = RequestRun(inferior, requests), inferior.recorder, inferior.model.vocab_size
    for request in range(len(requests.prompts)):
        run.begin(request)
    run.step()
    while not any(map(run.done, run.emitted)):
        at = len(run.emitted[0])
        right = {
            request: reported[at : min(at + _RIGHT, requests.steps)]
            for request, reported in requests.forced.items()
        }
        recorder.branch, here = None, inferior.step_number
        for request, drafts in right.items():
            room = requests.steps - at - len(drafts)
            wrong = [(requests.forced[request][at] + 1 + i) % vocabulary for i in range(min(_WRONG, room))]
            inferior.draft(request, [*drafts, *wrong])
        inferior.step()
        inferior.rewind(here)
        recorder.branch = 0
        for request, drafts in right.items():
            inferior.draft(request, drafts)
            run.emitted[request] += drafts
        run.step()
    run.finish()
    return run.tokens


def rewound(inferior: Inferior, requests: Requests) -> Emitted:
    """After another request with the same prefix has come and gone, all in one batch, whose first chunks are kept:
    everything after them is run, with other tokens emitted, then thrown away and run again. What is thrown away is not
    recorded."""
    recorder, vocabulary = inferior.recorder, inferior.model.vocab_size

    def other(token: int) -> int:
        return (token + 1) % vocabulary

    recorder.branch = None
    prefix = inferior.config.chunk_tokens or 1
    prompt = requests.prompts[0]
    together(inferior, Requests(((*prompt[:prefix], *map(other, prompt[prefix:])),), requests.steps))
    inferior.rewind(0)  # without sequences: the next pass is the first one again
    recorder.branch = 0
    run = RequestRun(inferior, requests)
    for request in range(len(requests.prompts)):
        run.begin(request)
    run.step()
    kept = {request: list(reported) for request, reported in run.emitted.items()}
    recorder.branch = None
    while not any(map(run.done, run.emitted)):
        run.step(other)
    inferior.rewind(1)
    run.emitted.update(kept)
    recorder.branch = 0
    run.finish()
    return run.tokens
