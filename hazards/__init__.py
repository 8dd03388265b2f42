"""What goes wrong with hooks, case by case, done with several tools and judged against a truth computed otherwise.

`make hazards` runs every case with tenterhook, with PyTorch's own hooks, with the small tracer that many projects carry
around, and with the other libraries where their environments exist, and writes `docs/hazards.md`.
"""
