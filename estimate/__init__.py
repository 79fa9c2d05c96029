"""Estimates how much memory a model and its training need, without allocating that memory."""
