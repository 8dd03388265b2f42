"""The module calls of a run: their inputs and outputs, and everything that their results depend on."""
