"""What tenterhook costs, measured side by side with doing nothing and with PyTorch's own hooks."""
