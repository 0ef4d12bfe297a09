"""Tries of random models and numbers: each raises AssertionError where the engine and what it is held against part."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel import shards
from lockstep.engine.run.sampler import choose
from lockstep.engine.run.sampling import Sampling
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.library.checked_model import ModelToCheck
from tests.checkpoints import CLASSES, tiny_checkpoint
from tests.fuzz.alike_models import ALIKE
from tests.fuzz.further_models import FURTHER
from tests.fuzz.models import DTYPES, KINDS, OWN, random_degrees, random_model, random_prompts

STEPS = 6
DRAWS = 2000
#: The name of the norms' constant in families that do not have `rms_norm_eps`.
EPSILON = {
    "starcoder2": "norm_epsilon",
    "nemotron": "norm_eps",
    "cohere": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
}
#: Standard deviations that an exact sampler passes once in some million tries.
FAR = 5.0


def check_model(kind: str, seed: int, directory: Path) -> None:
    """`lockstep check` of a random model of one of these families: right with taps and without."""
    chance = random.Random(seed)
    made = random_model(chance, chance.choice(KINDS[kind]))
    path = tiny_checkpoint(directory, made.family, seed=seed, **made.fields)
    model = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
    prompts = random_prompts(chance, model)
    (tp, ep), dtype = random_degrees(chance, model), chance.choice(DTYPES)
    asked = ModelToCheck.of(
        str(path), texts=None, ids=[",".join(map(str, ids)) for ids in prompts], chat=False, steps=STEPS,
        faults=None, tp=tp, ep=ep, device="cpu", dtype=dtype,
    )  # fmt: skip
    status = Status()
    with asked.engine(status) as inferior:
        result = asked.check(
            inferior, asked.reference(status), directory / "run.session", directory / "spare.session", status
        )
    event = result.event
    assert event.verdict == "match", f"{made.family} tp={tp} ep={ep} {dtype}: {event.words} {made.fields}"
    assert event.untapped is not None
    assert event.untapped.verdict == "match"


def config_parity(seed: int, directory: Path) -> None:
    """Our reading of a random config.json against transformers': parameters and shapes, and what has none. Of families
    whose parameters transformers calls what their files do."""
    chance = random.Random(seed)
    made = random_model(chance, chance.choice(sorted(OWN.keys() - FURTHER.keys() - ALIKE.keys())))
    theirs = made.config
    model = ModelConfig.from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    with torch.device("meta"):
        built = CLASSES[made.family][1](theirs)
    corrections = [one for one in built.named_buffers() if one[0].endswith(shards.CORRECTION)]
    expected = {name: tuple(tensor.shape) for name, tensor in (*built.named_parameters(), *corrections)}
    assert _as_stored(model) == expected
    assert model.rms_eps == getattr(theirs, EPSILON.get(made.family, "rms_norm_eps"))
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"]
        * model.num_layers
    )
    sliding = [window is not None for window in model.windows]
    assert sliding == [kind == "sliding_attention" for kind in kinds]
    assert {window for window in model.windows if window} <= {getattr(theirs, "sliding_window", None)}
    for layer, kind in enumerate(kinds):
        stated = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert model.of_layer(layer).rope_theta == stated["rope_theta"]


def _as_stored(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters as the checkpoint has them: some are stacked."""
    found: dict[str, tuple[int, ...]] = {}
    stacked = stored_in(model)
    for name, shape in shards.parameters(model).items():
        place = stacked.get(name)
        found |= {name: shape} if place is None else {place.tensor: place.shape}
    return found


def sampling(seed: int, directory: Path) -> None:
    """Draws from random logits against the exact distribution (chi-squared)."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(chance.randint(2, 400), generator=generator) * chance.choice((0.1, 1.0, 4.0))
    given = Sampling(
        temperature=chance.choice((0.3, 1.0, 2.5)),
        top_k=chance.choice((0, 1, 5, 40)),
        top_p=chance.choice((1.0, 0.95, 0.5, 0.01)),
        seed=seed,
    )
    counts = np.zeros(len(logits))
    for position in range(DRAWS):
        counts[choose(logits, given, 0, position).token] += 1
    expected = exact(logits.double().numpy(), given) * DRAWS
    assert not counts[expected == 0].any(), "a token was drawn that cannot be"
    often = expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    due = np.append(expected[often], expected[~often].sum())
    if due[-1] == 0:
        seen, due = seen[:-1], due[:-1]
    if len(due) > 1:
        assert deviations(float(((seen - due) ** 2 / due).sum()), len(due) - 1) < FAR


def deviations(chi_squared: float, freedom: int) -> float:
    """How far out it lies, in standard deviations (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def exact(logits: np.ndarray, given: Sampling) -> np.ndarray:
    """The distribution by its definition: the k likeliest, of these the fewest that reach p, renormalised."""
    order = np.argsort(-logits, kind="stable")[: given.top_k or None]
    weights = np.exp((logits[order] - logits[order[0]]) / given.temperature)
    shares = weights / weights.sum()
    kept = int(np.searchsorted(np.cumsum(shares), given.top_p)) + 1
    found = np.zeros(len(logits))
    found[order[:kept]] = shares[:kept] / shares[:kept].sum()
    return found
