"""Where what passes goes: shards on disk, running statistics, lines of text, TensorBoard."""
