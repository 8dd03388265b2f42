"""A probe, not a benchmark: where the time of a harvest to host memory goes. Prints tables; temporary."""

# ruff: noqa
from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import queue
import statistics
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_harvest import DEVICE, LAYERS, MEMORY, SAMPLES, TINY, TOKENS, llama
from tenterhook.harvest.job import Job
from tenterhook.harvest.make import hand_over
from tenterhook.harvest.rows import Taking
from tenterhook.sinks.pinned import Piece, PinnedStage
from tenterhook.sinks.shards import Column
from tenterhook.sinks.shards_file import Rows, as_bytes
from tenterhook.sinks.shards_place import Directory
from tenterhook.sinks.shards_write import Writer
from transformers import masking_utils

BATCHES, ROUNDS = (2, 2) if TINY else (24, 8)
BEGAN = time.perf_counter()
import faulthandler
faulthandler.dump_traceback_later(75, exit=True)
LIMIT = 110.0


class Discard(Writer):
    def _write(self, shard: int, column: Any, piece: Any) -> None:
        self.seconds["copy"] += piece.ready()
        piece.release()


def _column(key: str, rows: Tensor) -> Column:
    return Column(key, "value", key, Rows(key, rows.dtype, tuple(rows.shape[1:])).kind, tuple(rows.shape[1:]))


class FakeEvent:
    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class FakeStream:
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, *_: Any) -> FakeEvent:
        return FakeEvent()

    def synchronize(self) -> None: ...


if TINY:
    Event: Any = FakeEvent
    Stream: Any = FakeStream
    on = lambda stream: contextlib.nullcontext()
    current = FakeStream
    sync = lambda: None
    pinned = lambda n: torch.empty(n, dtype=torch.uint8)
    keep_for = lambda tensor, stream: None
else:
    Event, Stream, on, current = torch.cuda.Event, torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream
    sync = torch.cuda.synchronize
    pinned = lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True)
    keep_for = lambda tensor, stream: tensor.record_stream(stream)

# -- the test of a number at the beginning of a forward -------------------------------------------------------------------

ORIGINAL = getattr(masking_utils, "find_packed_sequence_indices", None)
waited = {"sync": 0.0}


def timed_find(*args: Any, **kwargs: Any) -> Any:
    began = time.perf_counter()
    found = ORIGINAL(*args, **kwargs)
    waited["sync"] += time.perf_counter() - began
    return found


@contextlib.contextmanager
def finding(function: Any) -> Any:
    if ORIGINAL is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = function
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = ORIGINAL


model = llama()
inner = model.model
NBYTES = SAMPLES * TOKENS * inner.config.hidden_size * next(inner.parameters()).element_size()
gen = torch.Generator().manual_seed(1)
batches = [torch.randint(1000, (SAMPLES, TOKENS), generator=gen) for _ in range(BATCHES)]
if not TINY:
    batches = [b.pin_memory() for b in batches]
side = Stream()
RING = pinned(MEMORY if not TINY else NBYTES * 64)
SLOTS = RING.numel() // NBYTES
DEST = torch.zeros(NBYTES * 2 * LAYERS, dtype=torch.uint8)


class Way:
    """Runs all batches; a hook on every block does ``passed``; after a batch ``after``; at the end ``end``."""

    chunk = 0
    record_stream = True
    timing = False
    blocking = False
    thread = ""  # "", "wait", "poll", "copy", "numpy"
    threads = 1
    group = 1
    late = ""  # "", "end", "next"
    slots = 0
    copies = True
    events = True

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        for key, value in options.items():
            setattr(self, key, value)
        self.slot = 0
        self.held: list[Any] = []
        self.group_of: list[Any] = []
        self.before: list[Any] = []
        self.todo: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def room(self) -> Tensor:
        at = self.slot % (self.slots or SLOTS)
        self.slot += 1
        return RING[at * NBYTES : (at + 1) * NBYTES]

    def passed(self, _m: Any, _a: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if not self.events:
            return
        if self.late == "next" and self.before:
            self.send([self.before.pop(0)], None)
        if self.late:
            self.group_of.append(value)
            return
        self.group_of.append(value)
        if len(self.group_of) == self.group:
            self.send(self.group_of, current().record_event())
            self.group_of = []

    def send(self, values: list[Any], computed: Any) -> None:
        with on(side):
            if computed is not None:
                side.wait_event(computed)
            if not self.copies:
                return
            began = None
            if self.timing:
                began = Event(enable_timing=True)
                began.record(side)
            rooms = []
            for value in values:
                flat = value.detach().flatten(0, 1).reshape(-1).view(torch.uint8)
                room = self.room()
                if self.chunk:
                    for i in range(0, NBYTES, self.chunk):
                        room[i : i + self.chunk].copy_(flat[i : i + self.chunk], non_blocking=True)
                else:
                    room.copy_(flat, non_blocking=True)
                rooms.append(room)
            done = Event(enable_timing=self.timing, blocking=self.blocking)
            done.record(side)
        if self.record_stream:
            for value in values:
                keep_for(value, side)
        else:
            self.held.append((done, values))
        if self.thread:
            self.todo.put((began, done, rooms))

    def after(self) -> None:
        if self.late == "end":
            computed = current().record_event()
            for value in self.group_of:
                self.send([value], computed)
            self.group_of = []
        elif self.late == "next":
            for value in self.before:
                self.send([value], None)
            self.before, self.group_of = self.group_of, []
            side.wait_event(current().record_event())
        while len(self.held) > 2 * LAYERS:
            done, _ = self.held.pop(0)
            done.synchronize()

    def work(self) -> None:
        at = 0
        while (item := self.todo.get()) is not None:
            began, done, rooms = item
            if self.thread == "poll":
                while not done.query():
                    time.sleep(0.0003)
            else:
                done.synchronize()
            if began is not None:
                began.elapsed_time(done)
            for room in rooms:
                if self.thread == "copy":
                    at = (at + 1) % (2 * LAYERS)
                    DEST[at * NBYTES : (at + 1) * NBYTES].copy_(room)
                elif self.thread == "numpy":
                    at = (at + 1) % (2 * LAYERS)
                    DEST.numpy()[at * NBYTES : (at + 1) * NBYTES] = room.numpy()

    def run(self, spans: list[Any]) -> float:
        handles = [layer.register_forward_hook(self.passed) for layer in inner.layers] if self.name != "plain" else []
        workers = [threading.Thread(target=self.work) for _ in range(self.threads if self.thread else 0)]
        for worker in workers:
            worker.start()
        host = 0.0
        with torch.no_grad():
            for batch in batches:
                ids = batch.to(DEVICE, non_blocking=True)
                first = Event(enable_timing=True)
                first.record()
                began = time.perf_counter()
                inner(ids)
                host += time.perf_counter() - began
                last = Event(enable_timing=True)
                last.record()
                spans.append((first, last))
                self.after()
        if self.late == "next":
            self.after()
        for _ in workers:
            self.todo.put(None)
        for worker in workers:
            worker.join()
        self.held.clear()
        for handle in handles:
            handle.remove()
        sync()
        return host


class Ours(Way):
    """The library's way, or parts of it."""

    part = "all"

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.job = Job(inner, ("layers.*",), Taking("token"), stop=False)
        made = self.job.run(batches[0], 0)
        self.columns = {key: _column(key, rows) for (key, _), rows in made.rows.items()}
        self.writer = Discard(Directory("/tmp/none"), MEMORY // 2) if self.part in ("all", "ahead") else None

    def run(self, spans: list[Any]) -> float:
        host = 0.0
        for number, batch in enumerate(batches):
            first = Event(enable_timing=True)
            first.record()
            began = time.perf_counter()
            begin = self.writer.ahead if self.writer is not None else (lambda _: None)
            made = self.job.run(batch, number * SAMPLES, None if self.part == "record" else begin)
            host += time.perf_counter() - began
            last = Event(enable_timing=True)
            last.record()
            spans.append((first, last))
            if self.part == "all":
                hand_over(made, lambda key: self.columns[key[0]], 0, self.writer)
            elif self.part == "ahead":
                self.writer.hand(0, [(self.columns["layers.0"], piece) for key, piece in made.begun])
        if self.writer is not None:
            self.writer.drain()
        sync()
        return host


class Public(Way):
    def run(self, spans: list[Any]) -> float:
        import tenterhook as th

        began = time.perf_counter()
        th.harvest(inner, batches, "layers.*", to=lambda rows: None, rows="token", stop=False, progress=False, memory=MEMORY // 2)
        sync()
        last = Event(enable_timing=True)
        last.record()
        spans.append((last, last))
        return time.perf_counter() - began


class OldStage(PinnedStage):
    """As it was: events of its own for each copy."""

    def ahead(self, tensor: Tensor) -> Piece | None:
        offset = self._free.take(tensor.nbytes, wait=False)
        if offset is None:
            return None
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        return self._old(flat, offset, torch.cuda.current_stream(tensor.device).record_event())

    def _old(self, part: Tensor, offset: int, computed: Any) -> Piece:
        room = self._ring[offset : offset + part.numel()]
        began = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            began.record(self._stream)
            room.copy_(part, non_blocking=True)
            done.record(self._stream)
        part.record_stream(self._stream)

        def ready() -> float:
            done.synchronize()
            return float(began.elapsed_time(done)) / 1e3

        return Piece(as_bytes(room), ready, lambda: self._free.give(offset))


class Old(Ours):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        device = next(inner.parameters()).device
        if not TINY:
            self.writer._stages[device] = OldStage(self.writer.budget, device)

    def run(self, spans: list[Any]) -> float:
        host = 0.0
        for number, batch in enumerate(batches):
            first = Event(enable_timing=True)
            first.record()
            began = time.perf_counter()
            made = self.job.run(batch, number * SAMPLES, self.writer.ahead)
            host += time.perf_counter() - began
            last = Event(enable_timing=True)
            last.record()
            spans.append((first, last))
            for key, piece in made.begun:
                self.writer.hand(0, [(self.columns[key[0]], piece)])
            begun = {key for key, _ in made.begun}
            for key, tensor in made.rows.items():
                if key not in begun:
                    self.writer.put(0, self.columns[key[0]], tensor)
        self.writer.drain()
        sync()
        return host


ways: list[Way] = [
    Way("plain"),
    Ours("ours: recording only", part="record"),
    Ours("ours: all"),
    Old("ours: all, as it was before"),
    Public("th.harvest to a function, ring pinned each time"),
]
SYNCLESS = {
    "plain",
    "copies, whole ring, record_stream",
    "… thread waits, blocking, timing",
    "copies at the end",
    "ours: all",
}


def rates() -> None:
    """Device to pinned memory, alone."""
    if TINY:
        return
    source = torch.empty(NBYTES, dtype=torch.uint8, device=DEVICE)
    for label, rooms in (("one room", 1), ("16 rooms", 16), ("the whole ring", SLOTS)):
        best = 1e9
        for _ in range(3):
            sync()
            began = time.perf_counter()
            with on(side):
                for i in range(SLOTS):
                    at = i % rooms
                    RING[at * NBYTES : (at + 1) * NBYTES].copy_(source, non_blocking=True)
            sync()
            best = min(best, time.perf_counter() - began)
        print(f"device to pinned, {label}: {SLOTS * NBYTES / best / 1e9:.1f} GB/s, {best / SLOTS * 1e3:.3f} ms each")
    began = time.perf_counter()
    for _ in range(200):
        Event(enable_timing=True, blocking=True).record(side)
    print(f"event made and recorded: {(time.perf_counter() - began) / 200 * 1e6:.1f} µs")
    began = time.perf_counter()
    for _ in range(200):
        event = current().record_event()
        side.wait_event(event)
    print(f"record + wait_event: {(time.perf_counter() - began) / 200 * 1e6:.1f} µs")
    small = torch.zeros((), device=DEVICE)
    sync()
    began = time.perf_counter()
    for _ in range(200):
        bool(small == 0)
    print(f"bool() of a number on an idle device: {(time.perf_counter() - began) / 200 * 1e6:.1f} µs")
    began = time.perf_counter()
    for i in range(64):
        DEST[(i % 32) * NBYTES : (i % 32 + 1) * NBYTES].copy_(RING[i * NBYTES : (i + 1) * NBYTES])
    print(f"pinned to pageable by one thread: {64 * NBYTES / (time.perf_counter() - began) / 1e9:.1f} GB/s")
    print("cores:", os.cpu_count(), "torch threads:", torch.get_num_threads(), flush=True)


def table(title: str, chosen: list[Way], find: Any, rounds: int) -> None:
    walls: dict[str, list[float]] = {way.name: [] for way in chosen}
    hosts: dict[str, list[float]] = {way.name: [] for way in chosen}
    syncs: dict[str, list[float]] = {way.name: [] for way in chosen}
    gpus: dict[str, list[float]] = {way.name: [] for way in chosen}
    with finding(find):
        for way in chosen:
            print("warm", way.name, round(time.perf_counter() - BEGAN, 1), flush=True)
            way.run([])  # warm
        for turn in range(rounds):
            if time.perf_counter() - BEGAN > LIMIT:
                print("(out of time after", turn, "rounds)")
                break
            for way in chosen:
                spans: list[Any] = []
                waited["sync"] = 0.0
                sync()
                began = time.perf_counter()
                host = way.run(spans)
                walls[way.name].append((time.perf_counter() - began) / BATCHES * 1e3)
                hosts[way.name].append(host / BATCHES * 1e3)
                syncs[way.name].append(waited["sync"] / BATCHES * 1e3)
                gpus[way.name].append(statistics.median(a.elapsed_time(b) for a, b in spans))
    base = min(walls["plain"])
    print(
        f"\n## {title}: ms a batch (min, median, ratio of minima; host in forward; of it waiting for the number; GPU from first to last)"
    )
    for way in chosen:
        wall, name = walls[way.name], way.name
        print(
            f"{name:46s} {min(wall):7.2f} {statistics.median(wall):7.2f} {min(wall) / base:6.3f}   host {min(hosts[name]):6.2f}"
            f"  number {min(syncs[name]):6.2f}  GPU {min(gpus[name]):6.2f}"
        )
    sys.stdout.flush()


def profiled(way: Way) -> None:
    from torch.profiler import ProfilerActivity, profile

    global batches
    kept, batches = batches, batches[:6]
    try:
        kinds = [ProfilerActivity.CPU] + ([] if TINY else [ProfilerActivity.CUDA])
        with profile(activities=kinds) as prof:
            way.run([])
        kernels = copies = 0.0
        number, biggest = 0, {}
        spans = []
        for event in prof.events():
            if event.device_type.name != "CUDA":
                continue
            took = event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end, event.name))
            if "Memcpy DtoH" in event.name:
                copies, number = copies + took, number + (took > 50)
            elif "Memcpy" not in event.name:
                kernels += took
                biggest[event.name] = biggest.get(event.name, 0.0) + took
        print(
            f"\n## profile of {way.name!r}: kernels {kernels / 6e3:.2f} ms, DtoH {copies / 6e3:.2f} ms in {number / 6:.1f} large copies a batch"
        )
        for name, took in sorted(biggest.items(), key=lambda pair: -pair[1])[:6]:
            print(f"   {took / 6e3:7.3f} ms  {name[:90]}")
        idle, end = [], None
        for start, stop, name in sorted(span for span in spans if "Memcpy" not in span[2]):
            if end is not None and start > end:
                idle.append((start - end, name))
            end = stop if end is None else max(end, stop)
        idle.sort(key=lambda pair: -pair[0])
        print(
            f"   no kernel runs: {sum(gap for gap, _ in idle) / 6e3:.2f} ms a batch; largest gaps (µs, next kernel): "
            + "; ".join(f"{gap:.0f} {name[:40]}" for gap, name in idle[:12])
        )
        averages = sorted(prof.key_averages(), key=lambda each: -each.self_cpu_time_total)[:14]
        for each in averages:
            print(f"   host {each.self_cpu_time_total / 6e3:7.3f} ms {each.count / 6:7.1f}×  {each.key[:60]}")
    except Exception as error:
        print(f"profile of {way.name!r} failed: {error!r:.300}")
    finally:
        batches = kept
    sys.stdout.flush()


def python_profile(way: Way) -> None:
    prof = cProfile.Profile()
    prof.enable()
    way.run([])
    prof.disable()
    print(f"\n## Python of the main thread, {way.name!r}, {BATCHES} batches")
    pstats.Stats(prof, stream=sys.stdout).sort_stats("tottime").print_stats(28)
    sys.stdout.flush()


rates()
table("as it is", ways, timed_find, ROUNDS)
named = {way.name: way for way in ways}
if ORIGINAL is not None:
    table("without the test of a number", [way for way in ways if way.name in SYNCLESS], lambda *a, **k: None, 3)
print(f"all of it took {time.perf_counter() - BEGAN:.0f} s")
