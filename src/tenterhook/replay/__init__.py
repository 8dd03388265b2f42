"""Serving what was computed already: replay, sweeps, starting from the middle."""
