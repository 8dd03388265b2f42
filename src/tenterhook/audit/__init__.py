"""Listing of every hook on a model and in the process: its owner, its cost and its risks."""
