"""Recording: what is kept of a value, and the tape that holds it."""
