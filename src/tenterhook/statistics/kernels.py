"""Triton kernels of :mod:`tenterhook.statistics.fused`. No other module imports this one: Triton may not be installed.

Each kernel processes many tensors in one launch. It takes an array of addresses, and arrays with the properties of each
tensor. A tensor is divided into pieces of ``TILE * TILES`` elements. A program reads one piece once and accumulates in
registers. Sums are taken of the distance from the mean of the first tile, so that a mean far from zero does not cost
precision. Very large or very small values are first scaled by a power of two, so that their squares stay finite and
nonzero. The pieces of a tensor are then combined in double precision.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tenterhook.statistics.fused import ROW
from tenterhook.statistics.graph_table import CALLS
from tenterhook.statistics.graph_table import FIELDS as TABLE
from tenterhook.statistics.sampling import RUN
from tenterhook.statistics.sketch import BASE, HALF, INFINITE, SAMPLE, SHIFT

__all__ = ["FIELDS", "TILE", "TILES", "add_to_table", "bins", "gather", "pieces", "put_together", "set_addresses"]

TILE, TILES = tl.constexpr(1024), tl.constexpr(64)
AT_ONCE = tl.constexpr(4)  # Tiles that are loaded concurrently.
MANY = tl.constexpr(128)  # Pieces that are combined at a time.
TINY, GROW = tl.constexpr(2.0**-40), tl.constexpr(2.0**40)
HUGE, SHRINK = tl.constexpr(2.0**60), tl.constexpr(2.0**-100)
# Fields of a piece: finite elements, mean, sum of squared deviations, min, max, zeros, NaN, and one unused.
FIELDS = tl.constexpr(8)
ROW_ = tl.constexpr(ROW)
WIDTH_, CALLS_ = tl.constexpr(len(TABLE)), tl.constexpr(CALLS)
RUN_, SAMPLE_ = tl.constexpr(RUN), tl.constexpr(SAMPLE)
SHIFT_, BASE_, HALF_ = tl.constexpr(SHIFT), tl.constexpr(BASE), tl.constexpr(HALF)
INFINITE_ = tl.constexpr(INFINITE)
jit: Any = triton.jit


@jit
def _tile(base, places, end, MASKED: tl.constexpr):
    """Return the values at some positions, a mask of the finite ones, and a mask of the positions before ``end``."""
    if MASKED:
        there = places < end
        x = tl.load(base + places, mask=there, other=0.0).to(tl.float32)
        finite = (tl.abs(x) < float("inf")) & there
    else:
        x = tl.load(base + places).to(tl.float32)
        there = places == places  # True everywhere, with the right shape.
        finite = tl.abs(x) < float("inf")
    return x, finite, there


@jit
def _shift(base, begin, end, MASKED: tl.constexpr):
    """Return the scale for the elements of a piece, and the shift to subtract after scaling."""
    early, usable, _ = _tile(base, begin + tl.arange(0, TILE), end, MASKED)
    early = tl.where(usable, early, 0.0)
    size = tl.max(tl.abs(early), 0)
    small = (size < TINY) & (size > 0.0)
    scale = tl.where(size > HUGE, SHRINK, tl.where(small, GROW, 1.0))
    return scale, tl.sum(early * scale, 0) / tl.maximum(tl.sum(usable.to(tl.float32), 0), 1.0)


@jit
def _write(out, count, scale, shift, total, square, low, high, zeros, none):
    """Write the fields of a piece. ``total`` and ``square`` are sums over the distances from ``shift``."""
    some, unit = tl.maximum(count, 1.0), scale.to(tl.float64)
    total = total.to(tl.float64)
    tl.store(out, count)
    tl.store(out + 1, (shift.to(tl.float64) + total / some) / unit)
    tl.store(out + 2, tl.maximum(square.to(tl.float64) - total * total / some, 0.0) / unit / unit)
    tl.store(out + 3, low.to(tl.float64))
    tl.store(out + 4, high.to(tl.float64))
    tl.store(out + 5, zeros.to(tl.float64))
    tl.store(out + 6, none.to(tl.float64))


@jit
def _nothing_yet():
    """Return the initial sum, squares, minimum and maximum."""
    none = tl.zeros((TILE,), tl.float32)
    return none, none, tl.full((TILE,), float("inf"), tl.float32), tl.full((TILE,), float("-inf"), tl.float32)


@jit
def _piece(base, begin, end, out, MASKED: tl.constexpr):
    """Measure the elements of a tensor from ``begin`` on. Some may be beyond the end, NaN or Inf."""
    offsets = tl.arange(0, TILE)
    scale, shift = _shift(base, begin, end, MASKED)
    apart, square, low, high = _nothing_yet()
    tally = tl.zeros((TILE,), tl.int32)  # Counts of finite elements, zeros and NaN, in ten bits each.
    for group in range(TILES // AT_ONCE):
        for part in tl.static_range(0, AT_ONCE):
            place = begin + (group * AT_ONCE + part) * TILE
            x, finite, there = _tile(base, place + offsets, end, MASKED)
            off = tl.where(finite, x * scale - shift, 0.0)
            apart += off
            square += off * off
            low = tl.minimum(low, tl.where(finite, x, float("inf")))
            high = tl.maximum(high, tl.where(finite, x, float("-inf")))
            zero, none = (x == 0.0) & there, x != x  # Only NaN is not equal to itself.
            tally += finite.to(tl.int32) + zero.to(tl.int32) * 1024 + none.to(tl.int32) * 1048576
    count = tl.sum(tally & 1023, 0).to(tl.float64)
    zeros, none = tl.sum((tally >> 10) & 1023, 0), tl.sum(tally >> 20, 0)
    total, squares = tl.sum(apart, 0), tl.sum(square, 0)
    _write(out, count, scale, shift, total, squares, tl.min(low, 0), tl.max(high, 0), zeros, none)


@jit
def _full_piece(base, begin, end, out):
    """Measure a complete piece. This takes half the work per element if all elements are finite."""
    offsets = tl.arange(0, TILE)
    scale, shift = _shift(base, begin, end, False)
    apart, square, low, high = _nothing_yet()
    zeros = tl.zeros((TILE,), tl.int32)
    for group in range(TILES // AT_ONCE):
        for part in tl.static_range(0, AT_ONCE):
            x = tl.load(base + (begin + (group * AT_ONCE + part) * TILE + offsets)).to(tl.float32)
            off = x * scale - shift
            apart += off
            square += off * off
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
            zeros += (x == 0.0).to(tl.int32)
    squares = tl.sum(square, 0)
    if squares < float("inf"):  # False if an element is NaN or Inf, and possibly if a square overflows.
        count, none = tl.full((), TILE * TILES, tl.float64), tl.full((), 0, tl.int32)
        total = tl.sum(apart, 0)
        _write(out, count, scale, shift, total, squares, tl.min(low, 0), tl.max(high, 0), tl.sum(zeros, 0), none)
    else:
        _piece(base, begin, end, out, False)


@jit
def pieces(
    addresses,
    counts,
    of,
    nth,
    out,
    DTYPE: tl.constexpr,
):
    """Measure one piece. ``of`` is the index of its tensor, and ``nth`` its index within that tensor."""
    piece = tl.program_id(0)
    which = tl.load(of + piece)
    base = tl.load(addresses + which).to(tl.pointer_type(DTYPE))
    base = tl.multiple_of(base, 16)
    end = tl.load(counts + which)
    begin = tl.load(nth + piece).to(tl.int64) * (TILE * TILES)
    if begin + TILE * TILES <= end:
        _full_piece(base, begin, end, out + piece * FIELDS)
    else:
        _piece(base, begin, end, out + piece * FIELDS, True)


@jit
def _together(found, begin, end):
    """Combine the pieces from ``begin`` to ``end``: finite elements, mean, squared deviations, min, max, zeros, NaN."""
    offsets = tl.arange(0, MANY)
    count = tl.zeros((MANY,), tl.float64)
    total = tl.zeros((MANY,), tl.float64)
    zeros = tl.zeros((MANY,), tl.float64)
    none = tl.zeros((MANY,), tl.float64)
    low = tl.full((MANY,), float("inf"), tl.float64)
    high = tl.full((MANY,), float("-inf"), tl.float64)
    for start in range(begin, end, MANY):
        there = start + offsets < end
        at = found + (start + offsets) * FIELDS
        number = tl.load(at, mask=there, other=0.0)
        count += number
        total += number * tl.load(at + 1, mask=there, other=0.0)
        low = tl.minimum(low, tl.load(at + 3, mask=there, other=float("inf")))
        high = tl.maximum(high, tl.load(at + 4, mask=there, other=float("-inf")))
        zeros += tl.load(at + 5, mask=there, other=0.0)
        none += tl.load(at + 6, mask=there, other=0.0)
    finite = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(finite, 1.0)
    square = tl.zeros((MANY,), tl.float64)
    for start in range(begin, end, MANY):
        there = start + offsets < end
        at = found + (start + offsets) * FIELDS
        off = tl.load(at + 1, mask=there, other=0.0) - mean
        square += tl.load(at + 2, mask=there, other=0.0) + tl.load(at, mask=there, other=0.0) * off * off
    return finite, mean, tl.sum(square, 0), tl.min(low, 0), tl.max(high, 0), tl.sum(zeros, 0), tl.sum(none, 0)


@jit
def put_together(
    found,
    first,
    last,
    counts,
    out,
):
    """Combine the pieces of one tensor: ``first[which]`` up to, but not including, ``last[which]``."""
    which = tl.program_id(0)
    begin, end = tl.load(first + which), tl.load(last + which)
    finite, mean, spread, low, high, zeros, nan = _together(found, begin, end)
    line = out + which * ROW_
    tl.store(line, mean)
    tl.store(line + 1, tl.sqrt(spread / tl.maximum(finite, 1.0)))
    tl.store(line + 2, tl.where(finite > 0, low, float("nan")))
    tl.store(line + 3, tl.where(finite > 0, high, float("nan")))
    tl.store(line + 4, tl.sqrt(spread + finite * mean * mean))
    tl.store(line + 5, zeros)
    tl.store(line + 6, nan)
    tl.store(line + 7, tl.load(counts + which).to(tl.float64) - finite - nan)


@jit
def _add(place, number):
    tl.store(place, tl.load(place) + number)


@jit
def add_to_table(
    found,
    first,
    last,
    counts,
    of,
    rows,
    table,
):
    """Combine the pieces of one tensor, and add its fields to a row of a table of :mod:`.graph_table`."""
    entry = tl.program_id(0)
    which = tl.load(of + entry)
    begin, end = tl.load(first + which), tl.load(last + which)
    finite, mean, spread, low, high, zeros, nan = _together(found, begin, end)
    number = tl.load(counts + which).to(tl.float64)
    line = table + tl.load(rows + entry) * WIDTH_
    squares = spread + finite * mean * mean
    before = tl.load(line + CALLS_)
    _add(line, mean * finite)
    _add(line + 1, squares)
    _add(line + 2, squares)
    _add(line + 3, zeros)
    _add(line + 4, nan)
    _add(line + 5, number - finite - nan)
    _add(line + 6, number)
    _add(line + CALLS_, 1.0)
    tl.store(line + 8, 1.0)
    # The row of a tensor that was not measured before is zero.
    tl.store(line + 10, tl.where(before > 0, tl.maximum(tl.load(line + 10), -low), -low))
    tl.store(line + 11, tl.where(before > 0, tl.maximum(tl.load(line + 11), high), high))


@triton.jit(do_not_specialize=[f"a{place}" for place in range(32)])
def set_addresses(
    out,
    a0, a1, a2, a3, a4, a5, a6, a7,
    a8, a9, a10, a11, a12, a13, a14, a15,
    a16, a17, a18, a19, a20, a21, a22, a23,
    a24, a25, a26, a27, a28, a29, a30, a31,
):  # fmt: skip
    """Store addresses in an array. Arguments of a launch are also right when a CUDA graph replays it."""
    _set_eight(out, a0, a1, a2, a3, a4, a5, a6, a7)
    _set_eight(out + 8, a8, a9, a10, a11, a12, a13, a14, a15)
    _set_eight(out + 16, a16, a17, a18, a19, a20, a21, a22, a23)
    _set_eight(out + 24, a24, a25, a26, a27, a28, a29, a30, a31)


@jit
def _set_eight(out, a0, a1, a2, a3, a4, a5, a6, a7):
    tl.store(out, a0)
    tl.store(out + 1, a1)
    tl.store(out + 2, a2)
    tl.store(out + 3, a3)
    tl.store(out + 4, a4)
    tl.store(out + 5, a5)
    tl.store(out + 6, a6)
    tl.store(out + 7, a7)


@triton.jit(do_not_specialize=["phase"])
def bins(
    addresses,
    phase,
    members,
    rooms,
    steps,
    takes,
    rows,
    out,
    DTYPE: tl.constexpr,
):
    """Count a sample of one tensor in the bins of its row of a sketch. ``members`` lists the tensors of this dtype."""
    which = tl.load(members + tl.program_id(0))
    offsets = tl.arange(0, SAMPLE_)
    there = offsets < tl.load(takes + which)
    base = tl.load(addresses + which).to(tl.pointer_type(DTYPE))
    places = phase % tl.load(rooms + which) + offsets * tl.load(steps + which)
    x = tl.load(base + places, mask=there, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    there = there & ((bits & 0x7FFFFFFF) < INFINITE_)
    found = ((bits & 0x7FFFFFFF) >> SHIFT_) - BASE_
    found = tl.minimum(tl.maximum(found, 0), HALF_ - 1) + tl.where(bits < 0, HALF_, 0)
    row = tl.load(rows + which)
    tl.atomic_add(out + row * (2 * HALF_) + found, tl.full((SAMPLE_,), 1, tl.int32), mask=there)


@jit
def gather(
    addresses,
    steps,
    widths,
    offsets,
    of,
    nth,
    out,
    DTYPE: tl.constexpr,
):
    """Copy the sampled elements of one tensor into ``out``, from ``offsets[which]`` on."""
    piece = tl.program_id(0)
    which = tl.load(of + piece)
    place = tl.load(nth + piece).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = place < tl.load(widths + which)
    base = tl.load(addresses + which).to(tl.pointer_type(DTYPE))
    source = place // RUN_ * tl.load(steps + which) + place % RUN_
    x = tl.load(base + source, mask=there, other=0.0).to(tl.float32)
    tl.store(out + tl.load(offsets + which) + place, x, mask=there)
