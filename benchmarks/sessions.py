"""The session file: size and latency at the design's scale (no engine, no GPU; arrays with realistic entropy).

    python -m benchmarks.sessions [--steps 10000] [--layers 24] [--ranks 2] [--keep PATH]

Prints what recording costs a step, the file's size, and what opening, seeking and a series take, each in a
process that has read nothing of the file yet (the operating system's page cache is warm).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lockstep.sessions import STATISTICS, SequenceStep, Session, SessionWriter, StepRecord, Tap, TensorRecord
from lockstep.sessions.meta import SessionMeta

_PER_LAYER = 20


def taps_of(layers: int) -> list[Tap]:
    """About as many taps as a model of that many layers has, alternating layouts."""
    names = ["embed", *(f"layers.{i}.tap{j}" for i in range(layers) for j in range(_PER_LAYER)), "logits"]
    return [Tap(i, name, "replicate" if i % 2 else "shard(1)") for i, name in enumerate(names)]


def statistics(rng: np.random.Generator, taps: int, ranks: int) -> np.ndarray:
    """Statistics as they look: random significands, related magnitudes, counters that stay zero."""
    scale = np.exp(rng.normal(size=(taps, 1))) * (1 + 0.05 * rng.normal(size=(taps, ranks)))
    stats = np.zeros((taps, ranks, len(STATISTICS)), np.float32)
    stats[..., 0], stats[..., 1] = -4 * scale, 4.1 * scale
    stats[..., 2], stats[..., 3] = scale * rng.normal(size=(taps, ranks)) * 0.01, scale
    stats[..., 4] = np.maximum(-stats[..., 0], stats[..., 1])
    return stats


def record_of(rng: np.random.Generator, step: int, taps: int, ranks: int, layers: int = 24) -> StepRecord:
    """A decode step of one sequence with a growing block table and a top-20."""
    sequence = SequenceStep(
        seq=0,
        ids=[int(rng.integers(150_000))],
        positions=[step],
        kv_lens=[[step + 1] * layers] * ranks,
        block_table=range(step // 16 + 1),
        emitted=int(rng.integers(150_000)),
        topk_ids=rng.integers(150_000, size=20).tolist(),
        topk_logits=np.sort(rng.normal(size=20).astype(np.float32))[::-1].tolist(),
        logsumexp=float(rng.normal()),
        entropy=float(rng.normal()),
    )
    return StepRecord(
        step=step,
        phase="decode" if step else "prefill",
        sequences=[sequence],
        wall_seconds=0.01,
        stats=statistics(rng, taps, ranks),
        checksums=rng.integers(2**64, size=(taps, ranks), dtype=np.uint64),
        free_blocks=1000,
        used_blocks=step // 16 + 1,
    )


def write(path: Path, steps: int, layers: int, ranks: int) -> dict[str, float]:
    """Record `steps` steps; milliseconds a step (mean, 99th percentile, worst) and megabytes."""
    rng, taps = np.random.default_rng(0), taps_of(layers)
    times = []
    with SessionWriter.create(path, taps=taps, ranks=ranks, meta=SessionMeta(), overwrite=True) as writer:
        for step in range(steps):
            record = record_of(rng, step, len(taps), ranks, layers)
            start = time.perf_counter()
            writer.step(0, record)
            times.append(1e3 * (time.perf_counter() - start))
    return {
        "taps": len(taps),
        "write_ms_mean": float(np.mean(times)),
        "write_ms_p50": float(np.median(times)),
        "write_ms_max": float(np.max(times)),
        "megabytes": path.stat().st_size / 1e6,
        "kilobytes_a_step": path.stat().st_size / 1e3 / steps,
    }


def read(path: Path) -> dict[str, float]:
    """Milliseconds to open, to seek (step and statistics, anywhere), and for one statistic of all steps."""
    start = time.perf_counter()
    session = Session.open(path)
    opened = time.perf_counter() - start
    rng, seeks, series = np.random.default_rng(1), [], []
    for step in rng.integers(len(session.steps()), size=50).tolist():
        start = time.perf_counter()
        session.step(step)
        session.stats(step)
        seeks.append(time.perf_counter() - start)
    for tap in rng.integers(len(session.taps), size=20).tolist():
        start = time.perf_counter()
        session.series(session.taps[tap].name, "rms", 0)
        series.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(1000):
        session.refresh()
    refreshed = (time.perf_counter() - start) / 1000
    session.close()
    return {
        "open_ms": 1e3 * opened,
        "seek_ms_p50": 1e3 * float(np.median(seeks)),
        "seek_ms_max": 1e3 * max(seeks),
        "series_ms_p50": 1e3 * float(np.median(series)),
        "series_ms_max": 1e3 * max(series),
        "refresh_ms": 1e3 * refreshed,
    }


def small(path: Path) -> dict[str, float]:
    """Megabytes of 32 tokens of a 0.5B model (24 layers, 14 heads, a prompt of 100): statistics, top-k, and the last
    position's attention row and logits of every layer."""
    rng, taps = np.random.default_rng(0), taps_of(24)
    with SessionWriter.create(path, taps=taps, ranks=2, meta=SessionMeta(), overwrite=True) as writer:
        for step in range(32):
            record = record_of(rng, step, len(taps), 2)
            rows = [
                TensorRecord(tap.name, rank, 0, rng.random((7, 1, 100 + step)).astype(np.float16), "float16")
                for tap in taps[1 : 24 * _PER_LAYER : _PER_LAYER]
                for rank in range(2)
            ]
            logits = rng.normal(size=(1, 151_936)).astype(np.float32)
            writer.step(0, record)
            writer.tensors(0, step, [*rows, TensorRecord("logits", 0, 0, logits, "float32")])
    return {"small_megabytes": path.stat().st_size / 1e6}


def main() -> None:
    """Run all of it and print one JSON object a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--read", type=Path, help="only measure reading this session")
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(arguments.read)))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = arguments.keep or Path(directory, "long.session")
        print(json.dumps(write(path, arguments.steps, arguments.layers, arguments.ranks)))
        for _ in range(2):
            subprocess.run([sys.executable, "-m", "benchmarks.sessions", "--read", str(path)], check=True)
        print(json.dumps(small(Path(directory, "small.session"))))


if __name__ == "__main__":
    main()
