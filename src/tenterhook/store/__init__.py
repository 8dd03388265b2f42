"""Recorded rows on disk and in object stores: the format, reading, writing, loading, and locks."""
