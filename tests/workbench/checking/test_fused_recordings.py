"""Recordings as engines with fused kernels give them: no scores, probabilities and caches, no partial products. Nobody
is accused where nothing is wrong, and known bugs are placed and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from lockstep.engine.config import DType, EngineConfig
from lockstep.sessions import Session, SessionWriter, StepRecord, Tap
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.forced_run import ForcedRun
from lockstep.workbench.checking.pipeline import Reference
from lockstep.workbench.diagnosis.diagnose import Explanation, diagnose
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL, Capture
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.models.requests import plan
from lockstep.workbench.references.request import GoldenSequence
from tests.by_turns import by_turns
from tests.checkpoints import VARIANTS, tiny_variant

#: What fused engines do not show.
HIDDEN = ("attn.scores", "attn.probs", "attn.k_cache", "attn.v_cache", ".partial")
PROMPTS = [list(range(3, 17)), [40, 41, 42, 50, 51]]
STEPS = 2

Explain = Callable[[Mapping[str, str]], Explanation]


def without(source: Path, path: Path, hidden: tuple[str, ...] = HIDDEN) -> Path:
    """The recording, but for those taps: not even their names are known."""
    with Session.open(source, UNLIMITED) as session:
        names = [tap for tap in session.taps if not tap.name.endswith(hidden)]
        taps = [Tap(i, tap.name, tap.layout) for i, tap in enumerate(names)]
        meta = session.meta
        with SessionWriter.create(path, taps=taps, ranks=session.ranks, meta=meta, overwrite=True) as writer:
            for step in session.steps():
                known = session.step(step)
                tensors = [
                    record
                    for one in known.sequences
                    for tap in taps
                    for record in session.parts(tap.name, step=step, seq=one.seq).values()
                ]
                writer.step(0, StepRecord(step, known.phase, known.sequences, 0.0, tensors=tensors))
    return path


def fused(model: OpenedModel, inferior: Inferior, folder: Path, rules: Mapping[str, str]) -> Explanation:
    """What is reported of a run by the engine's own fused attention."""
    sequences = tuple(GoldenSequence(tuple(prompt), (60, 61, 62)) for prompt in PROMPTS)
    run = ForcedRun(inferior, Reference(sequences, STEPS, folder, None), folder / "run.session", rules)
    shown = tuple(spec.name for spec in inferior.specs if not spec.name.endswith(HIDDEN))
    run.record(run.path, None, Capture(statistics=False, full=shown, last=()))
    with Session.open(without(run.path, folder / "fused.session"), UNLIMITED) as session:
        return diagnose(session, Facts.of(model.path, session.meta.config.dtype))


def engine(model: OpenedModel, tp: int, dtype: DType) -> Inferior:
    return Inferior(
        model.path, model.config, plan(model, EngineConfig(tp=tp, dtype=dtype), PROMPTS, STEPS + 1, FULL)
    )


@pytest.fixture(scope="module")
def at_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explain]:
    """Two ranks, Llama with biases everywhere."""
    folder = tmp_path_factory.mktemp("fused")
    model = open_model(str(tiny_variant(folder, "llama-bias")))
    with engine(model, 2, "float32") as inferior:
        yield lambda rules: fused(model, inferior, folder, rules)


def test_nobody_is_accused_and_everything_is_judged(at_two: Explain) -> None:
    found = at_two({})
    assert (found.wrong, found.causes, found.unjudged, found.harmless) == ((), (), (), ())
    assert found.judged == (3 * 15 + 3) * 2  # taps and ranks


#: rule -> cause, its place, words.
BUGS = {
    "mask=none": ("mask_missing", "layers.*.attn.context, the prefill", "later ones"),
    "mask=additive": ("mask_zero_times_inf", "layers.0.attn.context", "0 * -inf"),
    "scale=one": ("scores_scale", "layers.*.attn.context", "the scale is missing"),
    "kv_expand=tiled": ("kv_heads_tiled", "layers.*.attn.context, heads 1, 2, 5, 6", "h % n"),
    "kv_expand=next": ("kv_heads_shifted_1", "layers.*.attn.context", "the KV head 1 after their own"),
    "cache_layer=shared": ("cache_of_another_layer", "layers.{0,1}.attn.context, decode", "those of layer 2"),
    "cache_reuse=false": ("cache_not_used", "layers.*.attn.context, decode", "not the cache"),
    "cache_values=keys": ("cache_keys_for_values", "layers.*.attn.context", "values are the keys"),
    "softmax=plus_one": ("softmax_plus_one", "layers.*.attn.context", "denominator"),
    "merge=features_first": ("context_heads_by_dim", "layers.*.attn.context", "[D, heads]"),
    "reduce=missing": ("not_reduced", "layers.*.{attn.o_proj,mlp.down}", "goes on with its own partial"),
    "row_bias=every_rank": (
        "bias_on_every_rank",
        "layers.*.{attn.o_proj,mlp.down}",
        "by every rank before the sum",
    ),
    "load_bias=false": ("bias_dropped", "layers.*.attn.{q,k,v}_proj", "is not added"),
    "rope_theta=1000000": ("rope_theta", "layers.*.attn.{q,k}_rope", "1e+06 instead of 10000"),
    "residual=twice": ("residual_repeated", "layers.*.{attn,mlp}_residual", "added 2 times"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", BUGS)
def test_a_known_bug_is_placed_and_named(rule: str, at_two: Explain) -> None:
    name, place, words = BUGS[rule]
    found = at_two(dict([rule.split("=")]))
    first = found.causes[0]
    assert (first.name, first.place) == (name, place)
    assert words in first.text


#: Ranks and dtypes.
LAYOUTS: tuple[tuple[int, DType], ...] = (
    (1, "bfloat16"),
    (2, "float32"),
    (4, "bfloat16"),
    (1, "float32"),
    (2, "bfloat16"),
    (4, "float32"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("variant", "layout"), by_turns([*VARIANTS], LAYOUTS))
def test_right_engines_are_not_accused(variant: str, layout: tuple[int, DType], tmp_path: Path) -> None:
    tp, dtype = layout
    model = open_model(str(tiny_variant(tmp_path, variant)))
    with engine(model, tp, dtype) as inferior:
        found = fused(model, inferior, tmp_path, {})
    assert (found.wrong, found.unjudged, found.harmless) == ((), (), ())
