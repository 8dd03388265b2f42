"""Where what passes goes: running statistics, lines of JSON, TensorBoard."""
