"""Reuse of recorded calls: replay, sweeps, and runs that start in the middle of a model."""
