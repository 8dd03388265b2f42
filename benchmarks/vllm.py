"""An engine of vLLM with tenterhook, compared with one without it, and a harvest with one of transformers.

vLLM is in an environment of its own: ``make bench-vllm``. The engines are in this process, in eager mode, in float32,
on one thread. Serving is timed in seconds of that thread, so other load on the machine affects it little.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

os.environ.update(  # vLLM reads these when it is imported.
    OMP_NUM_THREADS="1",  # Threads that wait for each other would be most of the noise.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_HOST_IP="127.0.0.1",
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

import tenterhook as th
from benchmarks.harness import Goal, Opener, Row, Trial, Workload, WrongValues, measure
from tenterhook.integrations.vllm import Engine, attach

POINT = "model.layers.4@resid"
VOCABULARY, WIDTH, LAYERS = 2000, 512, 6
REQUESTS, GENERATED = 16, 16
SMALL, PROMPTS, LONGEST, BATCH = 128, 2000, 200, 32
SAME, RECORDED, EDITED, HARVESTED = (Goal("ratio", at_most=1 / share) for share in (0.99, 0.93, 0.95, 1.5))
MOST, HARVESTS = 12, 2
WORKER = "tenterhook.integrations.vllm.Worker"
CLOSE = 1e-3


def run(rounds: int) -> Iterator[Row]:
    """Measure the whole suite."""
    with tempfile.TemporaryDirectory(prefix="tenterhook-bench-") as folder:
        model, path = _model(Path(folder), WIDTH, LAYERS)
        with _engine(path, worker_extension_cls="") as plain, _engine(path) as llm:
            yield from measure(serving(plain, llm), min(rounds, MOST))
            yield from measure(steering(plain, llm, model), min(rounds, MOST))
        model, path = _model(Path(folder), SMALL, LAYERS)
        with _engine(path, max_num_seqs=128, max_num_batched_tokens=2048) as llm:
            yield from measure(harvesting(llm, model), min(rounds, HARVESTS))


def _model(root: Path, width: int, layers: int) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(root / str(width))
    return model, root / str(width)


@contextmanager
def _engine(path: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(
        str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        **{"max_num_seqs": REQUESTS, "worker_extension_cls": WORKER, **options},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _prompts(count: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, longest, (count,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


class Served:
    """Requests to an engine, all at once. ``tokens`` are what it generated for them."""

    def __init__(self, llm: LLM, sampling: Any) -> None:
        self._llm, self._sampling = llm, sampling
        self._prompts = [{"prompt_token_ids": prompt} for prompt in _prompts(REQUESTS, 64)]
        self.tokens: dict[str, torch.Tensor] = {}

    def __call__(self) -> None:
        outputs = self._llm.generate(self._prompts, self._sampling, use_tqdm=False)
        self.tokens = {"tokens": torch.tensor([output.outputs[0].token_ids for output in outputs])}


def _sampling(count: int = GENERATED) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def serving(plain: LLM, llm: LLM) -> Workload:
    """Serve requests by an engine without the extension, and with it, with and without a recording of one layer."""
    return Workload(
        f"serve {REQUESTS} requests, {GENERATED} tokens each",
        {
            "vLLM alone": _served(plain),
            "attached, nothing asked": _served(llm, lambda engine: engine),
            "one layer of all requests recorded": _served(llm, lambda engine: engine.record(POINT)),
        },
        reference="vLLM alone",
        goals={"attached, nothing asked": SAME, "one layer of all requests recorded": RECORDED},
        calls=4,
        clock=time.thread_time,
    )


def _served(llm: LLM, block: Callable[[Engine], AbstractContextManager[Any]] | None = None) -> Opener:
    """Return a way that attaches outside of the timing, and opens and closes the block of each call inside it."""

    @contextmanager
    def opened() -> Iterator[Trial]:
        served = Served(llm, _sampling())
        if block is None:
            yield Trial(served, lambda: served.tokens)
            return
        engine = _attached(llm)

        def call() -> None:
            if block(engine) is engine:
                served()
                return
            with block(engine):
                served()

        yield Trial(call, lambda: served.tokens)
        engine.close()

    return opened


def _attached(llm: LLM) -> Engine:
    engine = attach(llm)
    if not isinstance(engine, Engine):
        raise TypeError(type(engine))
    return engine


def steering(plain: LLM, llm: LLM, model: LlamaForCausalLM) -> Workload:
    """Serve requests, each with a vector of its own at one layer. Making their parameters is part of the time."""
    generator = torch.Generator().manual_seed(2)
    vectors = list(torch.randn(REQUESTS, WIDTH, generator=generator))
    _check_steering(llm, model, vectors)

    @contextmanager
    def steered() -> Iterator[Trial]:
        engine = _attached(llm)

        def call() -> None:
            Served(llm, _steered(engine, vectors))()

        yield Trial(call)
        engine.close()

    return Workload(
        f"serve {REQUESTS} requests with {REQUESTS} vectors at one layer",
        {"vLLM alone, no edits": _served(plain), "tenterhook": steered},
        goals={"tenterhook": EDITED},
        calls=4,
        clock=time.thread_time,
    )


def _steered(engine: Engine, vectors: list[torch.Tensor]) -> list[SamplingParams]:
    return [engine.params(_sampling(), edits={POINT: th.add(vector)}) for vector in vectors]


def _check_steering(llm: LLM, model: LlamaForCausalLM, vectors: list[torch.Tensor]) -> None:
    """Compare the first tokens under some of the vectors with those of transformers."""
    engine = _attached(llm)
    served = Served(llm, _steered(engine, vectors))
    served()
    engine.close()
    for number in (0, 7, 15):
        ids = torch.tensor([_prompts(REQUESTS, 64)[number]])
        with torch.no_grad(), th.edit(model, {POINT: th.add(vectors[number])}):
            right = model(ids).logits[0, -1].argmax()
        if served.tokens["tokens"][number, 0] != right:
            raise WrongValues(f"request {number}: another first token than transformers under the same edit")


def harvesting(llm: LLM, model: LlamaForCausalLM) -> Workload:
    """Harvest the tokens of many prompts from the engine, and from transformers in padded batches."""
    prompts = _prompts(PROMPTS, LONGEST)
    by_length = sorted(range(PROMPTS), key=lambda number: len(prompts[number]))

    def way(harvest: Callable[[Callable[[dict[str, torch.Tensor]], None]], None], order: Sequence[int]) -> Opener:
        @contextmanager
        def opened() -> Iterator[Trial]:
            rows: list[torch.Tensor] = []

            def call() -> None:
                rows.clear()
                harvest(lambda batch: rows.append(batch[POINT]))

            yield Trial(call, lambda: {"rows": _reordered(torch.cat(rows), prompts, order)})

        return opened

    def padded(order: Sequence[int]) -> Opener:
        def harvest(to: Any) -> None:
            th.harvest(model, _padded([prompts[number] for number in order]), POINT, to=to, rows="token")

        return way(harvest, order)

    def served(to: Any) -> None:
        engine = _attached(llm)
        th.harvest(engine, prompts, POINT, to=to, rows="token")
        engine.close()

    return Workload(
        f"harvest {PROMPTS:,} prompts of 5 to {LONGEST} tokens",
        {
            "transformers, padded batches": padded(range(PROMPTS)),
            "transformers, prompts sorted by length": padded(by_length),
            "vLLM": way(served, range(PROMPTS)),
        },
        reference="transformers, padded batches",
        goals={"vLLM": HARVESTED},
        calls=1,
        tolerance=CLOSE,
    )


def _reordered(rows: torch.Tensor, prompts: list[list[int]], order: Sequence[int]) -> torch.Tensor:
    """Return rows of prompts that were harvested in this order, in the order of the prompts."""
    parts = rows.split([len(prompts[number]) for number in order])
    found = dict(zip(order, parts, strict=True))
    return torch.cat([found[number] for number in range(len(prompts))])


def _padded(prompts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Return batches of prompts, in their order, padded on the right."""
    batches = []
    for start in range(0, len(prompts), BATCH):
        part = [torch.tensor(prompt) for prompt in prompts[start : start + BATCH]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        batches.append({"input_ids": ids, "attention_mask": (ids > 0).long()})
    return batches
