"""An engine of vLLM with tenterhook, compared with the same without it, and a harvest with one of transformers.

vLLM is in an environment of its own: ``make bench-vllm``. One part alone, whose rows replace those of the page:
``python -m benchmarks.vllm harvest``; ``--prompts 100 --dry`` tries it. The engine is in this process, in eager mode,
in float32, on one thread. Times are those of the processor, so other load on the machine affects them little.

One engine serves all ways of a piece of work, because two engines differ by some percent: their memory is elsewhere.
The ways take turns, in many short rounds. A figure is the median of the ratios within a round, and its quartiles are
those of the same ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
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
from benchmarks.harness import Goal, Opener, Row, Trial, Workload, WrongValues, quiet, ratio, verify
from benchmarks.report import RESULTS, publish
from tenterhook.integrations.vllm import Engine, Worker, attach

POINT = "model.layers.4@resid"
VOCABULARY, WIDTH, LAYERS = 2000, 512, 6
REQUESTS, GENERATED = 16, 16
PROMPTS, LONGEST, BATCH = 2000, 200, 32
SAME, RECORDED, EDITED, HARVESTED = (Goal("ratio", at_most=1 / share) for share in (0.99, 0.93, 0.95, 1.5))
ROUNDS, HARVESTS = 150, 3
CLOSE = 1e-3
PARTS = ("serve", "steer", "harvest")


def run(rounds: int, parts: Sequence[str] = PARTS, prompts: int = PROMPTS) -> Iterator[Row]:
    """Measure the whole suite, or some parts of it."""
    with tempfile.TemporaryDirectory(prefix="tenterhook-bench-") as folder:
        if "serve" in parts or "steer" in parts:
            model, path = _model(Path(folder), WIDTH)
            with _engine(path, max_num_seqs=REQUESTS) as llm:
                if "serve" in parts:
                    yield from paired(serving(llm), rounds)
                if "steer" in parts:
                    yield from paired(steering(llm, model), rounds)
        if "harvest" in parts:
            model, path = _model(Path(folder), WIDTH // 2)
            with _engine(path, max_num_seqs=128, max_num_batched_tokens=2048) as llm:
                yield from paired(harvesting(llm, model, prompts), min(rounds, HARVESTS), warm=False)


def paired(work: Workload, rounds: int, *, warm: bool = True) -> list[Row]:
    """Check the values of all ways, and return the median of the ratios within a round for each, with its quartiles."""
    verify(work)
    times = _turns(work, rounds, warm=warm)
    rows = []
    for name, mine in times.items():
        found, goal = ratio(mine, times[work.baseline]), work.goals.get(name)
        text, met = (f"≤ {goal.at_most:.4g} of {work.baseline}", found.median <= goal.at_most) if goal else ("", None)
        rows.append(Row(work.name, name, found.median, "×", min(mine), found.quartiles, goal=text, met=met))
    return rows


def _turns(work: Workload, rounds: int, *, warm: bool) -> dict[str, list[float]]:
    """Return the times of each way: one call in each round, in a random order, after an untimed one if ``warm``."""
    times: dict[str, list[float]] = {name: [] for name in work.ways}
    draw = random.Random(0)  # noqa: S311 - not for security
    with quiet():
        for _ in range(rounds):
            gc.collect(0)
            for name in draw.sample(list(work.ways), len(work.ways)):
                with work.ways[name]() as trial:
                    if warm:
                        trial.call()
                    start = work.clock()
                    trial.call()
                    times[name].append(work.clock() - start)
    return times


def _model(root: Path, width: int) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
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
        worker_extension_cls=f"{Worker.__module__}.{Worker.__name__}",
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@contextmanager
def _without_extension(llm: LLM) -> Iterator[None]:
    """Take the extension out of the class of the engine's worker. vLLM adds it in the same way."""
    kind = type(llm.llm_engine.model_executor.driver_worker.worker)
    bases = kind.__bases__
    kind.__bases__ = tuple(base for base in bases if base is not Worker)
    try:
        yield
    finally:
        kind.__bases__ = bases


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


def serving(llm: LLM) -> Workload:
    """Serve requests by an engine without the extension, and with it, with and without a recording of one layer."""
    return Workload(
        f"serve {REQUESTS} requests, {GENERATED} tokens each",
        {
            "vLLM alone": _served(llm),
            "attached, nothing asked": _served(llm, lambda engine: engine),
            "one layer of all requests recorded": _served(llm, lambda engine: engine.record(POINT)),
        },
        reference="vLLM alone",
        goals={"attached, nothing asked": SAME, "one layer of all requests recorded": RECORDED},
        clock=time.thread_time,
    )


def _served(llm: LLM, block: Callable[[Engine], AbstractContextManager[Any]] | None = None) -> Opener:
    """Return a way that attaches outside of the timing, and opens and closes the block of each call inside it."""

    @contextmanager
    def opened() -> Iterator[Trial]:
        served = Served(llm, _sampling())
        if block is None:
            with _without_extension(llm):
                yield Trial(served, lambda: served.tokens)
            return
        with _attached(llm) as engine:

            def call() -> None:
                if block(engine) is engine:
                    served()
                    return
                with block(engine):
                    served()

            yield Trial(call, lambda: served.tokens)

    return opened


def _attached(llm: LLM) -> Engine:
    engine = attach(llm)
    if not isinstance(engine, Engine):
        raise TypeError(type(engine))
    return engine


def steering(llm: LLM, model: LlamaForCausalLM) -> Workload:
    """Serve requests, each with a vector of its own at one layer. Making their parameters is part of the time."""
    generator = torch.Generator().manual_seed(2)
    vectors = list(torch.randn(REQUESTS, WIDTH, generator=generator))
    _check_steering(llm, model, vectors)

    @contextmanager
    def steered() -> Iterator[Trial]:
        with _attached(llm) as engine:
            yield Trial(lambda: Served(llm, _steered(engine, vectors))())  # noqa: PLW0108  # parameters are made in each call

    return Workload(
        f"serve {REQUESTS} requests with {REQUESTS} vectors at one layer",
        {"vLLM alone, no edits": _served(llm), "tenterhook": steered},
        goals={"tenterhook": EDITED},
        clock=time.thread_time,
    )


def _steered(engine: Engine, vectors: list[torch.Tensor]) -> list[SamplingParams]:
    return [engine.params(_sampling(), edits={POINT: th.add(vector)}) for vector in vectors]


def _check_steering(llm: LLM, model: LlamaForCausalLM, vectors: list[torch.Tensor]) -> None:
    """Compare the first tokens under some of the vectors with those of transformers."""
    with _attached(llm) as engine:
        served = Served(llm, _steered(engine, vectors))
        served()
    for number in (0, 7, 15):
        ids = torch.tensor([_prompts(REQUESTS, 64)[number]])
        with torch.no_grad(), th.edit(model, {POINT: th.add(vectors[number])}):
            right = model(ids).logits[0, -1].argmax()
        if served.tokens["tokens"][number, 0] != right:
            raise WrongValues(f"request {number}: another first token than transformers under the same edit")


def harvesting(llm: LLM, model: LlamaForCausalLM, count: int) -> Workload:
    """Harvest the tokens of many prompts from the engine, and from transformers in padded batches."""
    prompts = _prompts(count, LONGEST)
    as_given, by_length = range(count), sorted(range(count), key=lambda number: len(prompts[number]))

    def way(harvest: Callable[[Any], object], order: Sequence[int]) -> Opener:
        @contextmanager
        def opened() -> Iterator[Trial]:
            rows: list[torch.Tensor] = []

            def call() -> None:
                rows.clear()
                harvest(lambda batch: rows.append(batch[POINT]))

            yield Trial(call, lambda: {"rows": _reordered(torch.cat(rows), prompts, order)})

        return opened

    def padded(order: Sequence[int]) -> Opener:
        batches = _padded([prompts[number] for number in order])
        return way(lambda to: th.harvest(model, batches, POINT, to=to, rows="token"), order)

    def served(to: Any) -> None:
        with _attached(llm) as engine:
            th.harvest(engine, prompts, POINT, to=to, rows="token")

    return Workload(
        f"harvest {count:,} prompts of 5 to {LONGEST} tokens",
        {
            "transformers, padded batches": padded(as_given),
            "transformers, prompts sorted by length": padded(by_length),
            "vLLM": way(served, as_given),
        },
        reference="transformers, padded batches",
        goals={"vLLM": HARVESTED},
        tolerance=CLOSE,
        clock=time.process_time,
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


def main() -> None:
    """Measure some parts, and replace their rows on the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm")
    parser.add_argument("parts", nargs="*", help=f"which to measure, of: {', '.join(PARTS)} (all of them)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each way (%(default)s)")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of the harvest (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="print only: leave the docs and the results alone")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    rows = list(run(options.rounds, options.parts or PARTS, options.prompts))
    publish("vllm", rows if options.dry else _with_known(rows), write=not options.dry)


def _with_known(rows: list[Row]) -> list[Row]:
    """Return the rows after the known ones of other work."""
    file, measured = RESULTS / "vllm.json", {row.work for row in rows}
    known = [Row(**each) for each in json.loads(file.read_text())["rows"]] if file.exists() else []
    return [row for row in known if row.work not in measured] + rows


if __name__ == "__main__":
    main()
