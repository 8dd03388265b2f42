"""Statistics of many GPU tensors in two kernel launches, plus one for each further dtype. Each tensor is read once.

In training on a GPU, the host is often the bottleneck. Then the cost of a statistic is not the reading of the tensors
but the launch: each operation takes the host some microseconds. Here the addresses of all tensors of a step are in one
array, and one Triton kernel (see :mod:`tenterhook.statistics.kernels`) reads all of them. PyTorch for CUDA includes
Triton. If Triton is missing, or its first kernel fails or gives a wrong result, :mod:`tenterhook.statistics.measure`
computes the same with PyTorch operations. It also does so for other devices and dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tenterhook.statistics.host_copy import PinnedArray

if TYPE_CHECKING:
    from tenterhook.statistics.sketch import Sketch

__all__ = ["DTYPES", "ROW", "Block", "Samples", "serves", "to_device", "why_not"]

DTYPES = frozenset([torch.float32, torch.float16, torch.bfloat16])
ALIGNED = 16  # Bytes that a thread reads at a time.
WARPS = 4
ROW = 8  # Statistics of one tensor: mean, std, min, max, norm, zeros, NaN, Inf, in the order of COLUMNS.
PINNED_BUFFERS = 3  # Address arrays that may be in transfer to the device at the same time.

wanted = True
"""False disables the Triton kernels. Benchmarks set it to measure the difference."""
devices = frozenset(["cuda"])


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on a device, or None. Run a first kernel and check its result."""
    try:
        found = Block([torch.Size([5]), torch.Size([70000])], [torch.float32] * 2, device)
        some = torch.arange(70000, dtype=torch.float32, device=device).sub_(1000)
        few = torch.tensor([0.0, 1.0, 2.0, float("nan"), float("inf")]).to(device)
        table = (
            PinnedArray((2, ROW), torch.float64).memory
            if device.type == "cuda"
            else torch.empty(2, ROW, dtype=torch.float64)
        )
        found.measure([few, some], table)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - a missing compiler, driver or package each raise another exception
        return f"{type(error).__name__}: {error}"
    true = [[1, (2 / 3) ** 0.5, 0, 2, 5**0.5, 1, 1, 1], [33999.5, 20207.25940, -1000, 68999, 0, 1, 0, 0]]
    true[1][4] = (70000 * (true[1][0] ** 2 + true[1][1] ** 2)) ** 0.5
    return None if np.allclose(table.numpy(), true, rtol=1e-5) else f"the first kernel gave {table.tolist()}"


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels can measure tensors of this dtype on this device."""
    return wanted and device.type in devices and dtype in DTYPES and why_not(device) is None


class Block:
    """Kernel launches that measure several tensors on one device.

    They are valid as long as the shapes and dtypes of the tensors stay the same.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        from tenterhook.statistics import kernels

        self._shapes, self.device = shapes, device
        self._put_together = _Kernel(kernels.put_together, len(shapes), WARPS)
        counts = np.array([shape.numel() for shape in shapes], np.int64)
        many = -(-counts // (kernels.TILE.value * kernels.TILES.value))
        first = np.zeros(len(counts), np.int64)
        self._found = torch.empty(int(many.sum()), kernels.FIELDS.value, dtype=torch.float64, device=device)
        # For each dtype, one launch for the pieces (with the tensor and the index of each piece, and the output rows),
        # and one launch for the samples.
        self._launches: list[tuple[_Kernel, tuple[Tensor, Tensor, Tensor, Any]]] = []
        self._bins: list[tuple[_Kernel, Tensor, Any]] = []
        begin = 0
        for dtype in dict.fromkeys(dtypes):
            members = np.array([i for i, each in enumerate(dtypes) if each is dtype], np.int64)
            of, nth, starts = _cut(many[members])
            first[members] = begin + starts
            out = self._found[begin : begin + len(of)]
            arrays = (to_device(device, part) for part in (members[of].astype(np.int32), nth))
            kind = _type(dtype)
            self._launches.append((_Kernel(kernels.pieces, len(of), WARPS), (*arrays, out, kind)))
            which = to_device(device, members.astype(np.int32))
            self._bins.append((_Kernel(kernels.bins, len(members), 1), which, kind))
            begin += len(of)
        numbers = (counts, first.astype(np.int32), (first + many).astype(np.int32))
        self._counts, self._first, self._last = (to_device(device, part) for part in numbers)
        self._sampled: tuple[Any, Tensor, Tensor, Tensor, Tensor] | None = None
        self._addresses = _Addresses(device)

    def measure(self, tensors: Sequence[Tensor], table: Tensor, *, in_a_row: bool = False) -> None:
        """Write one row for each tensor, with the columns of ``COLUMNS`` from the mean on.

        ``table`` may be in pinned memory of the host. ``in_a_row`` means that all tensors are known to be contiguous.
        """
        addresses = self._addresses(tensors, in_a_row=in_a_row)
        with _on(self.device):
            for measure, rest in self._launches:
                measure(addresses, self._counts, *rest)
            self._put_together(self._found, self._first, self._last, self._counts, table)

    def count(self, sketch: Sketch, rows: Sequence[int], phase: int) -> None:
        """Add a sample of each tensor of the last :meth:`measure` to a sketch, at these rows."""
        addresses = self._addresses.array
        key = tuple(rows)
        if self._sampled is None or self._sampled[0] != key:
            self._sampled = (key, *self._places(rows))
        counts = sketch.room(self.device, max(rows) + 1)
        with _on(self.device):
            for count, members, kind in self._bins:
                count(addresses, phase, members, *self._sampled[1:], counts, kind)

    def _places(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from tenterhook.statistics.sampling import spacing
        from tenterhook.statistics.sketch import SAMPLE

        found = [spacing(tuple(shape), SAMPLE) if shape.numel() > SAMPLE else (1, 1) for shape in self._shapes]
        rooms = np.array([room for _, room in found], np.int64)
        steps = np.array([step for step, _ in found], np.int64)
        takes = np.array([min(SAMPLE, shape.numel()) for shape in self._shapes], np.int64)
        numbers = (rooms, steps, takes, np.array(rows, np.int64))
        return tuple(to_device(self.device, part) for part in numbers)  # type: ignore[return-value]


class Samples:
    """Samples of several tensors in one buffer, used to measure how much the tensors change."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None) -> None:
        from tenterhook.statistics import kernels
        from tenterhook.statistics.sampling import RUN, spacing

        self._type, self._tensors = _type(tensors[0].dtype), tensors
        device = self.device = tensors[0].device
        counts = np.array([tensor.numel() for tensor in tensors], np.int64)
        widths = counts if limit is None else np.minimum(counts, max(RUN, limit // RUN * RUN))
        steps = [
            spacing(tuple(tensor.shape), width // RUN, RUN)[0] if width < tensor.numel() else RUN
            for tensor, width in zip(tensors, widths.tolist(), strict=True)
        ]
        offsets = np.r_[0, np.cumsum(-(-widths // RUN) * RUN)]
        of, nth, _ = _cut(-(-widths // kernels.TILE.value))
        self._lay = _Kernel(kernels.gather, len(of), WARPS)
        self.shares = counts / widths
        numbers = (np.array(steps, np.int64), widths, offsets[:-1], of, nth)
        self._plan = tuple(to_device(device, part) for part in numbers)
        self._addresses = _Addresses(device)
        self._now, self._before = (torch.zeros(int(offsets[-1]), device=device) for _ in range(2))
        where = list(zip(offsets.tolist(), widths.tolist(), strict=False))
        self._both = [memory[o : o + w] for memory in (self._now, self._before) for o, w in where]
        self._block = Block([part.shape for part in self._both], [torch.float32] * len(self._both), device)

    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Sample other tensors of the same shapes and dtype from now on."""
        self._tensors = tensors

    def take(self) -> None:
        """Save the current values."""
        self._gather(self._before)

    def measure(self, table: Tensor) -> None:
        """Write a row for the current values of each tensor, then a row for its change.

        This overwrites the saved values.
        """
        self._gather(self._now)
        torch.sub(self._now, self._before, out=self._before)
        self._block.measure(self._both, table, in_a_row=True)

    def count(self, sketch: Sketch, rows: Sequence[int]) -> None:
        """Add samples of the last :meth:`measure` to a sketch. ``rows`` has one entry for each row of the table."""
        self._block.count(sketch, rows, 0)

    def _gather(self, out: Tensor) -> None:
        steps, widths, offsets, of, nth = self._plan
        addresses = self._addresses(self._tensors)
        with _on(self.device):
            self._lay(addresses, steps, widths, offsets, of, nth, out, self._type)


class _Kernel:
    """A Triton kernel with a fixed grid size, for arguments of fixed types and aligned memory.

    For each launch, Triton inspects every argument to select a variant of the kernel. This takes the host longer than
    the launch itself. So the first call keeps the compiled variant, and later calls launch it directly. ``fixed`` are
    the first arguments, if they are the same in every call.
    """

    def __init__(self, kernel: Any, programs: int, warps: int, fixed: Sequence[Any] = ()) -> None:
        self._kernel, self._programs, self._warps = kernel, programs, warps
        self._fixed, self._pointers = fixed, _pointers(fixed)
        self._launch: Any = None

    def __call__(self, *args: Any) -> None:
        """Launch the kernel on the current stream of the current device."""
        if self._launch is not None:
            self._launch(*self._pointers, *_pointers(args))
            return
        compiled = self._kernel[(self._programs,)](*self._fixed, *args, num_warps=self._warps)
        if compiled is not None:  # Triton's interpreter returns None.
            self._launch = compiled[self._programs, 1, 1]


def _pointers(args: Sequence[Any]) -> list[Any]:
    """Return addresses in place of tensors. For a tensor, Triton would ask the driver which device owns the memory."""
    return [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]


class _Addresses:
    """An array with the addresses of some tensors, on their device. It is reused if the addresses did not change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: list[int] = []
        self.array: Tensor | None = None
        self._copies: list[Tensor] = []
        self._buffers: Iterator[PinnedArray] = iter(())

    def __call__(self, tensors: Sequence[Tensor], *, in_a_row: bool = False) -> Tensor:
        if in_a_row:
            found = list(map(Tensor.data_ptr, tensors))
        else:
            found = [tensor.data_ptr() if tensor.is_contiguous() else 1 for tensor in tensors]
        if found == self._last and self.array is not None and not self._copies:
            return self.array
        self._last, numbers = found, np.array(found, np.int64)
        # Copy tensors that are not contiguous or not aligned. The previous copies can be freed: the kernels that read
        # them are already queued on the stream, before anything that could reuse the memory.
        odd = np.flatnonzero(numbers % ALIGNED).tolist()
        self._copies = [tensors[place].detach().clone(memory_format=torch.contiguous_format) for place in odd]
        numbers[odd] = [copy.data_ptr() for copy in self._copies]
        self.array = self._over(numbers)
        return self.array

    def _over(self, numbers: Any) -> Tensor:
        """Copy the numbers to the device array. The previous content is overwritten."""
        if self._device.type != "cuda":
            return to_device(self._device, numbers)
        if self.array is None:
            self.array = to_device(self._device, numbers)
            self._buffers = itertools.cycle(
                [PinnedArray(self.array.shape, self.array.dtype) for _ in range(PINNED_BUFFERS)]
            )
            return self.array
        buffer = next(self._buffers)
        buffer.event.synchronize()  # Rarely waits: this buffer was last used several copies ago.
        buffer.array[:] = numbers
        buffer.copy(self.array, buffer.memory)
        return self.array


def _cut(many: Any) -> tuple[Any, Any, Any]:
    """Return, for all pieces, the tensor and the index within that tensor, and for each tensor its first piece."""
    first = np.r_[0, np.cumsum(many)[:-1]]
    of = np.repeat(np.arange(len(many)), many)
    return of.astype(np.int32), (np.arange(len(of)) - first[of]).astype(np.int32), first


def to_device(device: torch.device, numbers: Any) -> Tensor:
    """Copy numbers to a device. They are pinned first, because CUDA synchronises for a copy from pageable memory."""
    found = torch.from_numpy(np.ascontiguousarray(numbers))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _on(device: torch.device) -> Any:
    """Return a context in which ``device`` is current, because Triton launches on the current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
