"""Estimate how much memory a model and its training take, without allocating it."""
