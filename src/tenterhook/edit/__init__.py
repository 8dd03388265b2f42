"""Editing: changing values and gradients on their way, checked against what they replace."""
