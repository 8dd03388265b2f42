"""Recording: how values and gradients are kept, and the tape that holds them."""
