"""How a point is reached: module calls, arguments, parameters and plain tensors."""
