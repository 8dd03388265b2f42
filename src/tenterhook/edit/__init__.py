"""Editing: replace values and gradients while a model runs, and check that the replacement fits."""
