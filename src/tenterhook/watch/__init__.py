"""Watching a model during training: running statistics, the first NaN or Inf, findings, a flight recorder."""
