"""Record what an engine computes. `lockstep tap --write` puts it there: it needs torch 2.1, Python 3.10, nothing else.

    tape = Tape("dump", rank, size, engine="mine 0.1", model="path/of/the/checkpoint")
    tape.step(ids, positions)                          # a forward pass begins; the one before is written
    tape.tap("layers.3.attn.q_proj", q, "shard(1)")    # wherever there is a tensor; its first axis is the tokens

An nn.Module with the part names of transformers, vLLM, SGLang or nano-vllm needs no taps by hand: `attach(model, tape);
follow(model, tape)` (lockstep_modules.py, in the same file then). Afterwards `lockstep import
lockstep dump -o run.session`. Names, layouts and the format of the dump: docs/tap-format.md of Lockstep.

What is tapped is copied at once: kernels write over their inputs. A tape never raises into a running engine: at its
first error it reports to stderr and tape.json, drops the pass at hand, takes its hooks away and records no more. So
it does where memory or disk would not do (lockstep_limits.py), or two threads tap at a time. What torch.compile has
compiled is not recorded. A closed tape costs nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .lockstep_limits import TapeLimits, alone, refuse_capture

__version__ = "1.0"
FORMAT = 1  # of the dump
WAITING_BYTES = (
    1 << 24
)  # of one width are held on the device before they are measured; of all, eight times that
MOST_BYTES, MOST_TAPS, LONGEST_LINE = (
    64 << 30,
    100_000,
    64 << 20,
)  # of a rank's files, names, line: what is read again
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Tape:
    """The recording of one rank of `size`, in `folder`/rank`rank`, which must be new.

    `config`: the model's Hugging Face config (a mapping, or what has `to_dict`). `mode`: "eager", "compiled".
    `capture` "stats" keeps eight statistics and a hash of each row in place of its numbers, except of the taps that
    `tensors`, globs, match; "ids" keeps no tap at all. `only`: globs of the taps to record. After `passes` passes the
    tape closes itself.
    """

    def __init__(
        self, folder: str | Path, rank: int = 0, size: int = 1, *, engine: str = "", model: str = "",
        config: Any = None, mode: str = "eager", capture: str = "full", only: str | Iterable[str] = "*",
        tensors: str | Iterable[str] = (), passes: float = math.inf,
    ) -> None:  # fmt: skip
        if not 0 <= rank < size or capture not in ("full", "stats", "ids"):
            raise ValueError(
                f"rank {rank} of {size} (the first is 0), capture {capture!r} (full, stats, ids)"
            )
        config = config.to_dict() if hasattr(config, "to_dict") else config or {}
        config = json.dumps(config, default=str, skipkeys=True)
        self.facts: dict[str, Any] = {
            "format": "lockstep-tape", "version": FORMAT, "tap": __version__, "rank": rank, "size": size,
            "engine": engine, "mode": mode, "model": str(model), "capture": capture, "dtype": "", "device": "",
            "closed": False,
            "torch": str(torch.__version__), "config": json.loads(config, parse_constant=str),  # infinity is no JSON
        }  # fmt: skip
        self.folder, self.passes, self.closed = Path(folder) / f"rank{rank}", passes, False
        self.index = self.layer = 0  # the next pass; the decoder layer that runs
        self.line: dict[str, Any] | None = None  # the pass that is open
        self.shape: tuple[int, ...] = ()  # of its ids
        self.held: int | None = None  # columns of a cache before those, where that is known
        self.undo: list[Callable[[], None]] = []  # takes hooks away again
        self._tensors: dict[str, Tensor] = {}
        self._waiting: dict[tuple[int, torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
        self._awaited: set[str] = set()
        self._early = ""  # the first tensor that was tapped before any pass began
        self._only = _Globs(() if capture == "ids" else only)
        self._whole = _Globs("*" if capture == "full" else tensors)
        self.limits = TapeLimits(self.folder, size)
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise FileExistsError(f"{self.folder} is there already: remove it, or record elsewhere") from None
        self._write_facts()
        self._at_exit = Finalize(None, self.close, exitpriority=100)  # children run no atexit

    @alone
    def step(
        self, ids: Any, positions: Any, requests: str | Iterable[Any] | None = None, places: Any = None,
        greedy: Iterable[str] | None = None,
    ) -> None:  # fmt: skip
        """A forward pass begins: token `ids` ([T] or [batch, T]) at `positions`, or from that one position on.

        `requests`: the request of each token ("" for padding), one name for all; None: all are of one request.
        `places`: how many tokens each has before it in its request, where the engine knows that by something else than
        the positions that it gives its model. `greedy`: the requests whose next token is the likeliest by the logits of
        this pass, with no processor between; None: not known of any.
        """
        if self.closed:
            return
        try:
            refuse_capture()
            self.end()
            if self.index >= self.passes:
                self.close()
                return
            self.limits.begin()
            ids, at = torch.as_tensor(ids), torch.as_tensor(positions)
            at = at if at.ndim else at + torch.arange(ids.shape[-1], device=at.device)
            at = at[0] if at.ndim > ids.ndim else at  # of the three rows of M-RoPE the first is time
            n, at = ids.numel(), at.expand(ids.shape)
            if requests is not None:
                requests = [requests] * n if isinstance(requests, str) else [str(one) for one in requests]
                if len(requests) != n:
                    raise ValueError(f"{len(requests)} requests for {n} tokens")
            if places is not None:
                places = torch.as_tensor(places).expand(ids.shape).flatten().tolist()
            self.shape = tuple(ids.shape)
            self._awaited = {"return"} if self.facts["capture"] == "ids" else {"logits", "return"}
            self._tensors, self._waiting = {}, {}
            self.line = {
                "pass": self.index, "ids": ids.flatten().tolist(), "positions": at.flatten().tolist(),
                "places": places, "requests": requests, "greedy": None if greedy is None else list(greedy),
                "file": f"pass{self.index:05d}.safetensors", "taps": [],
                "skipped": 0,
            }  # fmt: skip
        except Exception as error:
            self.stop("step", error)

    @alone
    def tap(self, name: str, x: Any, layout: str = "", rows: Iterable[int] | None = None) -> None:
        """Record `x`: its first axis (its first two where ids are [batch, T]) are the tokens of the pass.

        `rows` are these tokens where they are not all; of fewer, without `rows`, each is the last of its request.
        `layout` is how the ranks share it: replicate, shard(DIM), shard(DIM,replicas=N), partial; "": not stated.
        """
        if self.line is None or name not in self._only:
            self._early = self._early or name
            return
        try:
            x = torch.as_tensor(x).detach()
            x = x.to_local() if hasattr(x, "to_local") else x  # a DTensor's own shard
            batch = rows is None and len(self.shape) == 2 and x.shape[:2] == self.shape
            self.limits.take(name, layout, x.nbytes, name in self._whole)
            x = x.flatten(0, 1) if batch else x.reshape(x.shape or (1,))
            if x.is_cuda:
                refuse_capture()
            key, dtype = str(len(self.line["taps"])), str(x.dtype).removeprefix("torch.")
            x = x.half() if dtype in ("float8_e4m3fn", "float8_e5m2") else x  # the same numbers
            if name in self._whole:
                self._tensors[key] = x.to("cpu", copy=True)
            else:
                x = x if x.device.type in ("cpu", "cuda", "xpu") else x.cpu()  # others lack 64-bit numbers
                self._measured(key, x.reshape(len(x), -1).clone())
            reported = {"name": name, "key": key, "layout": layout, "dtype": dtype, "shape": list(x.shape)}
            self.line["taps"].append(
                reported if rows is None else reported | {"rows": [int(row) for row in rows]}
            )
            if not self.facts["dtype"] and x.is_floating_point():
                self.facts |= {"dtype": dtype, "device": x.device.type}
                self._write_facts()
        except Exception as error:
            self.stop(name, error)

    def cache(self, cache: dict[str, Any] | None) -> None:
        """Note where the rows of the pass lie in a paged cache, and which are read (docs/tap-format.md); None: not
        known."""
        if self.line is not None and cache is not None:
            self.line["cache"] = cache

    def _measured(self, key: str | None = None, x: Tensor | None = None) -> None:
        """Have `x` measured with others of its width, which takes a few kernels; without any, measure what waits."""
        if key is not None and x is not None:
            self._waiting.setdefault((x.shape[1], x.dtype, x.device), []).append((key, x))
            if sum(x.nbytes for many in self._waiting.values() for _, x in many) > 8 * WAITING_BYTES:
                key = None
        for kind, waiting in list(self._waiting.items()):
            if key is None or sum(x.nbytes for _, x in waiting) > WAITING_BYTES:
                lengths, rows = [len(x) for _, x in waiting], torch.cat([x for _, x in waiting])
                table, codes = statistics(rows).split(lengths), hashes(rows).split(lengths)
                for (name, _), stats, code in zip(waiting, table, codes, strict=True):
                    self._tensors |= {f"{name}.stats": stats, f"{name}.hash": code}
                del self._waiting[kind]

    @alone
    def end(self, raised: str = "") -> None:
        """The pass is over, or was cut short by what it `raised`: write it. Else the next `step` or `close` does."""
        line, self.line = self.line, None
        if line is None:
            return
        try:
            self._measured()
            text = json.dumps(line | ({"raised": raised} if raised else {})) + "\n"
            self.limits.write(sum(x.nbytes for x in self._tensors.values()) + len(text), len(text))
            write_safetensors(self.folder / line["file"], self._tensors)
            with open(self.folder / "passes.jsonl", "a", encoding="utf-8") as log:
                log.write(text)
            self.index, self._tensors = self.index + 1, {}
        except Exception as error:
            self.stop("writing", error)

    def reached(self, what: str) -> None:
        """The logits were seen, or the model's call returns: the pass is over with the later of the two."""
        self._awaited.discard(what)
        if not self._awaited:
            self.end()

    def skip(self) -> None:
        """Count a tensor that is not recorded, as it is not a row a token; between passes, a call without ids."""
        if self.line is not None:
            self.line["skipped"] += 1
        elif not self.closed:
            self.facts["unrecorded"] = self.facts.get("unrecorded", 0) + 1
            with contextlib.suppress(OSError):  # reported again, or found out, with the next pass
                self._write_facts()

    def stop(self, where: str, error: Exception) -> None:
        """Record no more: the pass at hand is dropped, the engine goes on as if there were no tape."""
        self.line, self._tensors, self._waiting = None, {}, {}
        self.facts["stopped"] = (
            f"pass {self.index}, {where[:100]}: {type(error).__name__}: {str(error)[:500]}"
        )
        print(f"lockstep_tap: {self.folder}: recording stopped at {self.facts['stopped']}", file=sys.stderr)
        with contextlib.suppress(OSError):  # that the disk is full has just been reported
            self._write_facts()
        self.close()

    def close(self) -> None:
        """Write the pass at hand and take all hooks away. The end of the process does it by itself."""
        if not self.closed:
            self.closed, error = True, getattr(sys, "last_value", None)  # what is ending the process
            self.end("" if error is None else f"{type(error).__name__}: {error}")
            if self._early and not self.index and "stopped" not in self.facts:
                print(
                    f"lockstep_tap: {self.folder}: nothing was recorded: {self._early} was tapped, but no pass "
                    "was begun by tape.step(ids, positions)",
                    file=sys.stderr,
                )
            undo, self.undo = self.undo, []
            for take_away in reversed(undo):
                take_away()
            self.facts["closed"] = True
            with contextlib.suppress(OSError):  # the folder may be gone
                self._write_facts()
            self._at_exit.cancel()

    def _write_facts(self) -> None:
        new = self.folder / "tape.json.new"
        new.write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
        os.replace(new, self.folder / "tape.json")


class _Globs:
    """The names that match one of several globs."""

    def __init__(self, globs: str | Iterable[str]) -> None:
        self.globs, self.known = [globs] if isinstance(globs, str) else list(globs), dict[str, bool]()

    def __contains__(self, name: str) -> bool:
        if name not in self.known:
            self.known[name] = any(fnmatchcase(name, glob) for glob in self.globs)
        return self.known[name]


def statistics(rows: Tensor) -> Tensor:
    """[n, m] -> [n, 8] float32: min, max, mean, rms, absmax (of finite numbers), how many are nan, inf and zero."""
    x = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    n, m = x.shape
    if not m:
        return x.new_zeros(n, 8).float()
    low, high = (
        x.amin(1),
        x.amax(1),
    )  # NaN and infinities show here; on a GPU to ask would cost more than to count
    nan = inf = x.new_zeros(n)
    count, kept = x.new_full((n,), m), x
    if x.device.type != "cpu" or not bool((high - low).isfinite().all()):
        finite, nan, inf = x.isfinite(), x.isnan().sum(1), x.isinf().sum(1)
        count, kept = finite.sum(1), x.where(finite, 0)
        low, high = x.where(finite, torch.inf).amin(1), x.where(finite, -torch.inf).amax(1)
    mean = kept.sum(1, dtype=torch.float64) / count
    rms = torch.linalg.vector_norm(kept, dim=1, dtype=torch.float64) / count.sqrt()
    zeros = torch.eq(x, 0, out=torch.empty_like(x)).sum(1, dtype=torch.float64)  # summing booleans is slower
    numbers = [
        one.double().where(count > 0, torch.nan) for one in (low, high, mean, rms, torch.maximum(-low, high))
    ]
    return torch.stack([*numbers, nan.double(), inf.double(), zeros], 1).float()


def hashes(rows: Tensor) -> Tensor:
    """[n, m] -> [n] int64, equal where the bits of rows are: each 8 bytes are mixed with their place, then summed."""
    raw = rows.contiguous().view(torch.uint8)
    words = torch.zeros((len(raw), -(-raw.shape[1] // 8) * 8), dtype=torch.uint8, device=raw.device)
    words[:, : raw.shape[1]] = raw
    mixed = words.view(torch.int64)
    mixed = (
        mixed + torch.arange(1, mixed.shape[1] + 1, device=raw.device) * -0x61C8864680B583EB
    ) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 29)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 32)).sum(1)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """The file appears under its name when it is whole."""
    header: dict[str, Any] = {}
    stop = 0
    for key, x in tensors.items():
        start, stop = stop, stop + x.nbytes
        code = CODES[str(x.dtype).removeprefix("torch.")]
        header[key] = {"dtype": code, "shape": list(x.shape), "data_offsets": [start, stop]}
    reported = json.dumps(header).encode()
    reported += b" " * (-len(reported) % 8)
    with open(path.with_suffix(".new"), "wb") as file:
        file.write(len(reported).to_bytes(8, "little") + reported)
        for held in tensors.values():
            x = held.cpu().contiguous()
            file.write((ctypes.c_char * x.nbytes).from_address(x.data_ptr()) if x.nbytes else b"")
    os.replace(path.with_suffix(".new"), path)
