"""Where tenterhook meets other libraries. Each module here is a leaf: nothing imports it but those who use it.

``transformers``: names that hold for many architectures, and generation. ``loop``: a tape every so many steps of a
training loop; ``lightning``: the same as a callback. ``tensorboard``: tapes as histograms. ``datasets``: features as
columns.
"""
