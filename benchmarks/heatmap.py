"""How long a heatmap's frame takes: pooling, drawing, and the whole path to the terminal's bytes.

    python benchmarks/heatmap.py [--json]

The heatmap is 200 × 60 cells. A *frame* is what happens between another matrix and the bytes for the
terminal: pooling, shading, segments, compositor, escape sequences. Noise is the worst case (no two cells
alike), attention the typical one. `processor` is the thread's own time, which a busy machine does not stretch.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time

import numpy as np
from textual.app import App, ComposeResult

from lockstep.workbench.tui.theme import DARK
from lockstep.workbench.tui.widgets.heatmap import Heatmap
from lockstep.workbench.tui.widgets.shading import Matrix

FRAMES = 30


def matrices(name: str) -> list[np.ndarray]:
    """FRAMES different matrices of a kind."""
    random = np.random.default_rng(0)
    if name == "noise 120×200":
        return [random.normal(size=(120, 200)).astype(np.float32) for _ in range(FRAMES)]
    if name == "noise 2048×2048":
        return [random.normal(size=(2048, 2048)).astype(np.float32) for _ in range(FRAMES)]
    rows = np.tril(random.exponential(1, (FRAMES, 512, 512)) ** 3 + 1e-6)
    return list((rows / rows.sum(-1, keepdims=True)).astype(np.float32))


class Bench(App[None]):
    """Nothing but a heatmap."""

    def compose(self) -> ComposeResult:
        """The heatmap fills the screen."""
        yield Heatmap()

    def on_mount(self) -> None:
        """Our theme, and what is there to stay is not collected, as the workbench has both."""
        self.register_theme(DARK)
        self.theme = DARK.name
        gc.freeze()


async def measure(name: str) -> dict[str, object]:
    """Milliseconds of a frame, after a first one that warms the styles up."""
    app = Bench()
    async with app.run_test(size=(200, 60)) as pilot:
        heatmap = app.query_one(Heatmap)
        seconds, processor = [], []
        for i, values in enumerate(matrices(name)):
            began, began_cpu = time.perf_counter(), time.thread_time()
            heatmap.set_reactive(Heatmap.matrix, Matrix(values))
            update = app.screen._compositor.render_full_update()
            size = len(update.render_segments(app.console))
            if i:
                seconds.append(time.perf_counter() - began)
                processor.append(time.thread_time() - began_cpu)
        await pilot.pause()
    ordered = sorted(1000 * s for s in seconds)
    return {
        "matrix": name,
        "median_ms": round(statistics.median(ordered), 2),
        "p95_ms": round(ordered[int(len(ordered) * 0.95)], 2),
        "median_cpu_ms": round(1000 * statistics.median(processor), 2),
        "bytes": size,
    }


def main() -> None:
    """Measure every kind."""
    found = [asyncio.run(measure(name)) for name in ("attention 512×512", "noise 120×200", "noise 2048×2048")]
    if "--json" in sys.argv:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    print(f"{'heatmap 200×60':<22}{'median':>10}{'p95':>10}{'processor':>12}{'bytes':>12}")
    for row in found:
        print(
            f"{row['matrix']:<22}{row['median_ms']:>8} ms{row['p95_ms']:>7} ms"
            f"{row['median_cpu_ms']:>9} ms{row['bytes']:>12}"
        )


if __name__ == "__main__":
    main()
