"""How time and memory grow with tokens, sequences and layers, beside transformers'.

    python -m benchmarks.growth [sequences] [tokens] [long] [layers] [--threads N] [--directory DIR] [--out docs]

Of a narrow model (4 layers of width 256, 8 heads) but for the curve over layers: prefill of 128 to 16,384 tokens,
decode of 1 to 64 sequences, both at 4 to 24 layers. Contenders take turns, each in processes of its own. What the
machine has no memory for is left out. The parts that are named (all of them: some eight minutes on two cores) replace
what OUT/growth.json has of them, and all of it is drawn as OUT/growth.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from benchmarks.model import half_billion
from lockstep.engine.config import EngineConfig
from lockstep.engine.machine import default_threads
from lockstep.engine.run.memory import check_loadable
from lockstep.workbench.bench.contenders import EngineContender, PeerContender, loaded_engine, memory_of
from lockstep.workbench.bench.measure import BenchRow, Plan, fitted, measure
from lockstep.workbench.export.bench_plot import ACROSS, Sized, panels
from lockstep.workbench.export.lines import line_charts
from lockstep.workbench.export.svg import standalone

PEER = "transformers"
TITLE = "Time and memory over tokens, sequences and layers, beside transformers"
NARROW = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 4096,
}  # fmt: skip
LAYERS = (4, 8, 16, 24)
#: By part. Short passes are timed in turns, long ones once: one takes long enough to count.
PLANS = {
    "sequences": Plan(batches=(1, 2, 4, 8, 16, 32, 64), lengths=(), rounds=3),
    "tokens": Plan(batches=(), lengths=(128, 256, 512, 1024, 2048), rounds=3),
    "long": Plan(batches=(), lengths=(4096, 8192, 16384), rounds=1),
}
DEEP = Plan(batches=(1,), lengths=(512,), rounds=3)
PARTS = (*PLANS, "layers")


class Growth(msgspec.Struct):
    """What OUT/growth.json holds: the rows of each part, and those of each number of layers."""

    threads: int
    parts: dict[str, list[BenchRow]] = {}
    layers: dict[str, list[BenchRow]] = {}


def grown(path: Path, plan: Plan, threads: int) -> list[BenchRow]:
    """The rows of a plan on one model; without those that memory has no room for."""
    config = EngineConfig(threads=threads)
    plan, config = fitted(check_loadable(path, config), plan, config)
    engine, seconds = loaded_engine(path, config)
    with engine, PeerContender(PEER, path, config.dtype, threads, plan.context) as peer:
        loaded = engine, path, seconds, memory_of(engine).now
        ours = [EngineContender("lockstep", *loaded), EngineContender("lockstep, statistics", *loaded, True)]
        return measure([*ours, peer], plan, PEER, lambda what: print(f"{path.name}: {what}", flush=True))


def drawn(growth: Growth) -> str:
    """The curves as SVG."""
    sized: list[tuple[str, str, Sized]] = []
    for kind, across in ACROSS.items():
        rows = [row for name in PLANS for row in growth.parts.get(name, ()) if row.what == kind]
        sized.append((kind, across, [(row.size, row) for row in rows]))
    for kind in ACROSS:
        deep = [(int(n), row) for n, rows in growth.layers.items() for row in rows if row.what == kind]
        sized.append((kind, "layers", deep))
    return standalone(line_charts(panels(sized), TITLE))


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--directory", type=Path, help="where checkpoints are made (default: the temp dir)")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    file, threads = arguments.out / "growth.json", arguments.threads
    growth = msgspec.json.decode(file.read_bytes(), type=Growth) if file.exists() else Growth(threads)

    def narrow(layers: int) -> Path:
        return half_billion(
            arguments.directory, num_hidden_layers=layers, max_position_embeddings=32768, **NARROW
        )

    for part in arguments.parts or PARTS:
        if part == "layers":
            growth.layers = {str(layers): grown(narrow(layers), DEEP, threads) for layers in LAYERS}
        else:
            growth.parts[part] = grown(narrow(4), PLANS[part], threads)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(growth), indent=1) + b"\n")
    (arguments.out / "growth.svg").write_text(drawn(growth), encoding="utf-8")


if __name__ == "__main__":
    main()
