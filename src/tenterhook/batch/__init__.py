"""Batches: several inputs in one run of a model, each with its own edits, recordings and gradients."""
