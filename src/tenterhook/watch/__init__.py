"""Watching a model while it trains: running statistics, the first NaN or Inf, findings, a flight recorder."""
