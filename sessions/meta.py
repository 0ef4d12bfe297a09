"""A session's metadata: one schema for every recorder (the engine, transformers, a foreign run).

Every field of `SessionMeta` is a row of the meta table, as JSON. All of them may be missing: "", None or an empty
container mean "not known". Strings are as they were recorded: clean what reaches a terminal.
"""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, Struct

from lockstep.sessions.records import MAX_LAYERS, STATISTICS

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Size = Annotated[int, Meta(ge=1, lt=2**53)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]
Scalar = None | bool | int | float | str

#: Keys of a Hugging Face `config.json`, and the fields of `ModelMeta` that they give.
HUGGING_FACE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "rms_eps",
    "initializer_range": "initializer_range",
}


class ModelMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model: name, location of the checkpoint, and shape.

    `path` is a directory or a file ("demo": the embedded model), `checkpoint` the digest of its tensors, `dtype`
    what they are stored in, `block_types` the types of a GGUF file's tensors. `windows[layer]` is a sliding window in
    tokens, None where a layer sees all.
    """

    name: str = ""
    path: str = ""
    checkpoint: str = ""
    family: str = ""
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_heads: Size | None = None
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    max_position: Size | None = None
    rms_eps: float | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Scalar | tuple[float, ...]] = {}
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = None
    tie_embeddings: bool | None = None
    windows: tuple[Size | None, ...] = ()
    dtype: str = ""
    bos_id: TokenId | None = None
    eos_ids: tuple[TokenId, ...] = ()
    block_types: tuple[str, ...] = ()
    initializer_range: float | None = None


class ConfigMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the model was run. `dtype` is that of the computation, `backend` that of the process group ("nccl",
    "gloo", "none"); the rest are options of the engine."""

    tp: Size | None = None
    device: str = ""
    dtype: str = ""
    backend: str = ""
    block_size: Size | None = None
    num_blocks: Count | None = None
    max_sequences: Count | None = None
    max_tokens: Count | None = None
    chunk_tokens: Count | None = None
    load: str = ""
    weights: str = ""
    timeout_seconds: float | None = None
    threads: Count | None = None
    listen: str = ""


class SamplingMeta(Struct, frozen=True, kw_only=True):
    """How tokens were chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class SequenceMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sequence began with. `forced` are the tokens that were given instead of sampled."""

    prompt_ids: tuple[TokenId, ...] = ()
    sampling: SamplingMeta | None = None
    forced: tuple[TokenId, ...] | None = None


class CaptureMeta(Struct, frozen=True, kw_only=True):
    """What was recorded of each step: statistics; tensors whole (`full`) or their last token's row (`last`), by
    glob."""

    statistics: bool = True
    full: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    budget_bytes: Count | None = None


class WeightShare(Struct, frozen=True, array_like=True):
    """One rank's share of a parameter: its statistics, and how it compares with the checkpoint: "equal",
    "different", or "absent" where the checkpoint has no such tensor."""

    name: str
    rank: Annotated[int, Meta(ge=0, lt=2**16)]
    shape: tuple[Count, ...]
    dtype: str
    statistics: Annotated[tuple[float, ...], Meta(min_length=len(STATISTICS), max_length=len(STATISTICS))]
    checksum: str  # hexadecimal
    checkpoint: str

    def statistic(self, name: str) -> float:
        """One of STATISTICS."""
        return self.statistics[STATISTICS.index(name)]

    @property
    def equal(self) -> bool:
        """Whether the rank holds bit for bit what the checkpoint has there."""
        return self.checkpoint == "equal"

    @property
    def empty(self) -> bool:
        """Whether it is nothing but zeros."""
        return self.statistic("zeros") == math.prod(self.shape)


#: Endings of the taps in which a recording without tensors keeps what it knows of each row of TAP: statistics
#: [T, STATISTICS], and hashes [T, 1] that are equal for bit-equal rows of the same engine. Where it knows statistics of
#: a pass alone, each of its rows has those of all of them together.
ROW_STATISTICS, ROW_HASHES, PASS_STATISTICS = ".row_statistics", ".row_hashes", ".pass_statistics"


#: Taps in which a recording of another engine keeps where the rows of its cache lie: tables of integers, those of all
#: passes since the step before (`workbench.views.provenance`).
CACHE_ROWS, CACHE_READS = "cache.rows", "cache.reads"


def is_companion(tap: str) -> bool:
    """Whether a tap holds what is known of others' rows, and is no operation of the model."""
    return tap in (CACHE_ROWS, CACHE_READS) or tap.endswith((ROW_STATISTICS, ROW_HASHES, PASS_STATISTICS))


class CacheMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The paged cache of some `layers` that share a block table: `block_size` rows a block; of a sliding `window` only
    the last rows are read."""

    layers: tuple[Annotated[int, Meta(ge=0, lt=MAX_LAYERS)], ...] = ()
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    window: Size | None = None


class ForeignMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of another engine's run: what its dump held, and what was settled to make a session of it.

    `mode` is how the engine ran ("eager", "compiled", "" not stated). `rows` of the dump's passes are in the session,
    `dropped` counts the others by why. `ranks` wrote passes, the others of the session wrote none; `cut` are passes
    of a rank that others did not finish. `inferred` are layouts that no dump has, by tap (`*` for the number of a
    layer). `requests_inferred`: whose rows are whose follows from positions alone. `statistics_only`: the dump holds no
    tensor. `lost` names what of the dump could not be used. `caches` are the groups of layers of which the session
    records where the rows of their cache lie (CACHE_ROWS, CACHE_READS). `shared` rows are an earlier request's, from a
    prefix cache; `unknown` of them are not in the session, as what was there was not computed for the same tokens.
    """

    format: str = ""
    mode: str = ""
    passes: Count = 0
    rows: Count = 0
    dropped: dict[str, Count] = {}
    ranks: tuple[Annotated[int, Meta(ge=0, lt=2**16)], ...] = ()
    cut: dict[int, Count] = {}
    inferred: dict[str, str] = {}
    requests_inferred: bool = False
    statistics_only: bool = False
    lost: tuple[str, ...] = ()
    caches: tuple[CacheMeta, ...] = ()
    shared: Count = 0
    unknown: Count = 0


class SessionMeta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All metadata of a session except the number of ranks, `Session.ranks`, which shapes every step's arrays.

    `source` names the recorder ("lockstep run", "transformers"), `notes` describe its method. `rules` are those
    of the main branch. `absent` gives the reason for each tap that the recorder cannot have, `biases` whole biases
    as little-endian float64, `weights` by branch what `info weights` found on the ranks. `foreign` is known of a run
    of another engine, imported from its dump.
    """

    source: str = ""
    model: ModelMeta = ModelMeta()
    config: ConfigMeta = ConfigMeta()
    rules: dict[str, str] = {}
    capture: CaptureMeta | None = None
    sequences: dict[int, SequenceMeta] = {}
    prompts: tuple[str, ...] = ()
    chat: bool | None = None
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    absent: dict[str, str] = {}
    biases: dict[str, bytes] = {}
    weights: dict[int, tuple[WeightShare, ...]] = {}
    token_texts: dict[int, str] = {}
    foreign: ForeignMeta | None = None

    @property
    def model_label(self) -> str:
        """The model's name, or else its path; "" if neither is known."""
        return self.model.name or self.model.path
