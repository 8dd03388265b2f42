"""Display of single tensors: statistics, and the layout as an image."""
