"""Stand-ins for engines: what their installers touch, after the public sources.

vLLM 0.32 (`vllm/v1/worker/worker_base.py`, `gpu_model_runner.py`, `gpu/model_runner.py`), SGLang (`srt/model_executor/
model_runner.py`, `forward_batch_info.py`) and nano-vllm (`engine/model_runner.py`). The model
is an embedding, a layer of one norm, and a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 16


class Head(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ torch.ones(hidden.shape[-1], VOCAB)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.input_layernorm(hidden)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(VOCAB, 4), nn.ModuleList([Layer()])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embed_tokens(ids))


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = Decoder(), Head()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits_processor(hidden)


@dataclasses.dataclass
class EngineArgs:
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    max_num_seqs: int = 256

    def create_engine_config(self) -> dict[str, object]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Rows:
    """A schedule: the tokens of each request, from which position on; `padding` rows at the end."""

    tokens: dict[str, list[int]]
    start: int = 0
    padding: int = 0

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {name: len(ids) for name, ids in self.tokens.items()}

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    def inputs(self, order: Sequence[str]) -> tuple[Tensor, Tensor]:
        ids = [token for name in order for token in self.tokens[name]]
        at = [self.start + row for name in order for row in range(len(self.tokens[name]))]
        fill = [0] * self.padding
        return torch.tensor(ids + fill), torch.tensor(at + fill)


class WorkerV1:
    """The worker of model runner V1: its batch is in an order of its own, logits are computed with the pass."""

    def __init__(self, model: ToyModel, tp: int = 1) -> None:
        self.model_runner: Any = SimpleNamespace(model=model, input_batch=SimpleNamespace(req_ids=[]))
        text = {"num_key_value_heads": 1}
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            model_config=SimpleNamespace(hf_text_config=text, model="toy", enforce_eager=True),
        )

    def get_model(self) -> ToyModel:
        return self.model_runner.model

    def execute_model(self, output: Rows) -> str | None:
        if not output.tokens:
            return "nothing"
        order = sorted(output.tokens, reverse=True)
        self.model_runner.input_batch.req_ids = [*order, "waiting"]
        ids, positions = output.inputs(order)
        model = self.get_model()
        hidden = model(input_ids=ids, positions=positions)
        if "fail" in output.tokens:
            raise RuntimeError("out of memory")
        ends = torch.tensor([len(output.tokens[name]) for name in order]).cumsum(0) - 1
        model.compute_logits(hidden[ends])
        return "done"

    def sample_tokens(self, grammar: object) -> str:
        return "sampled"


class WorkerV2(WorkerV1):
    """The worker of model runner V2: the batch is a value of its own, logits are computed when tokens are sampled."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model)
        self.model_runner = SimpleNamespace(model=model, prepare_inputs=self._prepare)

    def _prepare(self, output: Rows) -> SimpleNamespace:
        order = sorted(output.tokens, key=lambda name: len(output.tokens[name]))
        ids, positions = output.inputs(order)
        counts = torch.tensor([len(output.tokens[name]) for name in order]).numpy()
        return SimpleNamespace(req_ids=order, num_scheduled_tokens=counts, input_ids=ids, positions=positions)

    def execute_model(self, output: Rows) -> None:
        batch = self.model_runner.prepare_inputs(output)
        self.hidden = self.get_model()(input_ids=batch.input_ids, positions=batch.positions)

    def sample_tokens(self, grammar: object) -> str:
        self.get_model().compute_logits(self.hidden[-1:])
        return "sampled"


class WorkerWrapperBase:
    def __init__(self, worker: WorkerV1) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)

    def execute_model(self, scheduler_output: Rows) -> Any:
        return self.worker.execute_model(scheduler_output)


class ForwardMode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "idle"

    def is_extend(self) -> bool:
        return self.name == "extend"


class ForwardBatch(SimpleNamespace):
    """SGLang's: `req_pool_indices` name requests by their slot, `extend_seq_lens_cpu` counts the rows of each."""


@dataclasses.dataclass
class ServerArgs:
    model_path: str = ""
    disable_cuda_graph: bool = False
    disable_radix_cache: bool = False


class SGLangRunner:
    def __init__(self) -> None:
        self.model = ToyModel()
        self.model_config = SimpleNamespace(hf_text_config={"num_key_value_heads": 1}, model_path="toy")

    def forward(self, forward_batch: ForwardBatch) -> Tensor:
        hidden = self.model.forward(forward_batch.input_ids, forward_batch.positions)
        return self.model.compute_logits(hidden[-1:])


@dataclasses.dataclass
class NanoSequence:
    seq_id: int
    ids: list[int]
    num_cached_tokens: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: int) -> int:
        return self.ids[key]

    @property
    def last_token(self) -> int:
        return self.ids[-1]


class NanoRunner:
    def __init__(self, config: Any, rank: int) -> None:
        self.config, self.rank, self.world_size = config, rank, 1
        self.model = ToyModel()
        self.warmup_model()

    def warmup_model(self) -> None:
        self.run([NanoSequence(0, [0] * 8)], True)

    def run(self, seqs: list[NanoSequence], is_prefill: bool) -> None:
        rows = [range(seq.num_cached_tokens if is_prefill else len(seq) - 1, len(seq)) for seq in seqs]
        ids = torch.tensor([seq.ids[at] for seq, span in zip(seqs, rows, strict=True) for at in span])
        positions = torch.tensor([at for span in rows for at in span])
        self.model.compute_logits(self.model(ids, positions)[-len(seqs) :])
