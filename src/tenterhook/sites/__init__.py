"""The sites of points: module calls, arguments, parameters and plain tensors."""
