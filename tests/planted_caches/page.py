"""docs/planted-caches.md, from plants.toml and results.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.planted_caches.rows import HERE, CleanPairs, Level, Plant, Results, level, plants

PAGE = HERE.parents[1] / "docs" / "planted-caches.md"
HEAD = """# Planted bugs of caches and states

Bugs of the kinds that engines have where features meet: a prefix cache, chunks of prompts, preemption, drafts, windows
and states. They are put into a small paged engine of the tests (tests/planted_caches/programs/paged.py, a model of
transformers with random weights) and into vLLM (by a plugin, on a CPU), and looked for by one command each:

    lockstep invariant --axis AXIS --model MODEL -- COMMAND

of the paged engine with `--variant AXIS=WORDS`, which takes from it what the axis is about. Its requests share
beginnings, come in chunks, are preempted and speculated for, all in one run; vLLM's have its prefix cache, chunks and
scheduler on.

**Named** is a bug whose operation, request and position are reported first, and with it the block and whose rows it
holds, where a block is wrong. **Place**: the operation and the position alone. What the first look showed, before
anything was mended, stays beside it; what has to be reported of each (tests/planted_caches/plants.toml) was written
down after it, by what the bug does. Three bugs did nothing when they were first put in, and were looked at once more,
with the code as it was, when they did. An error in the first look is a recording that took longer to read than is
allowed of a stranger's. `make planted-caches` runs all rows again.

"""


def write(results: Results) -> None:
    """Write the page."""
    PAGE.write_text(text(results))


def text(results: Results) -> str:
    return HEAD + "\n".join([*_lines(results), *_clean(CleanPairs.load())]) + "\n"


def _lines(results: Results) -> Iterator[str]:
    then, now = (
        {key: level(plants()[key], found) for key, found in table.items()}
        for table in (results.first_look, results.rows)
    )
    yield f"First look: {_counts(then)}. Now: {_counts(now)}."
    yield ""
    yield "| bug | engine | axis | first look | now | what is reported |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for key, plant in plants().items():
        found = results.rows.get(key)
        yield (
            f"| {plant.what} | {_engine(plant)} | {plant.axis} | {then.get(key, 'not run')} | "
            f"{now.get(key, 'not run')} | {'' if found is None else found.text.replace('|', '/')} |"
        )


def _clean(found: CleanPairs) -> Iterator[str]:
    yield ""
    yield "## Right engines"
    yield ""
    yield (
        "The same engines without a bug, ours and transformers, on tiny random models of four families (vLLM: the demo "
        f"model), along all axes that they have (`make clean-axes`): {found.summary}. When they were first tried, one "
        "was accused: a convolution of Qwen3-Next, by 1.1e-6 of a row's norm, behind a hit."
    )
    yield ""
    yield "| engine | models | axes | pairs | accused |"
    yield "| --- | --- | --- | --- | --- |"
    for engine in dict.fromkeys(one.engine for one in found.pairs):
        mine = [one for one in found.pairs if one.engine == engine]
        axes, models = (
            ", ".join(dict.fromkeys(names)) for names in ([p.axis for p in mine], [p.family for p in mine])
        )
        accused = sum(one.verdict == "bug" for one in mine)
        name = {"vllm": "vLLM, TP 1", "vllm_2": "vLLM, TP 2"}.get(engine, engine)
        yield f"| {name} | {models} | {axes} | {len(mine)} | {accused} |"


def _engine(plant: Plant) -> str:
    if plant.engine == "vllm":
        return f"vLLM, TP {plant.ranks}"
    return {"qwen2": "paged", "windowed": "paged, windows"}.get(plant.model, "paged, Qwen3-Next")


def _counts(levels: dict[str, Level]) -> str:
    found = Counter(levels.values())
    return f"{found['named']} of {len(levels)} named, {found['place']} by place, {found['missed']} missed"
