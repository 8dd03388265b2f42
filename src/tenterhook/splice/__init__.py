"""Dictionaries in the stream of a model: sparse autoencoders and transcoders, and the files that hold them."""
