"""``th.harvest``: the inside of a model over a whole data set, on disk; and ``th.open``, which reads it again."""
