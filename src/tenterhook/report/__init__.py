"""Reports of recordings, for people to look at. They read tapes and tensors, never a model."""
