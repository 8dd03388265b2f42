"""The cost of every module: FLOPs, parameters, memory, bytes saved for backward, and time."""
