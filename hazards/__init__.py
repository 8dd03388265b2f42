"""Failure cases of hooks, run with several tools and compared with results that are computed in another way.

`make hazards` runs every case with tenterhook, with PyTorch's own hooks, with the small tracer that many projects copy,
and with other libraries if their environments exist. It writes `docs/hazards.md`.
"""
