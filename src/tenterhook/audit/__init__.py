"""Every hook on a model and in the process: who put it there, what it costs, what can go wrong with it."""
