"""Integrations with other libraries. No other part of tenterhook imports these modules, except on use.

``transformers``: the same names for many architectures, and recorded generation. ``loop``: a tape every few steps of a
training loop; ``lightning``: the same as a callback. ``tensorboard``: tapes as histograms. ``datasets``: features as
columns of a data set. ``ray``: harvesting with Ray Data. ``parquet`` and ``zarr``: export of stores. ``vllm``:
recording and editing requests inside a serving engine.
"""
