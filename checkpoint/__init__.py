"""Checkpoints: write, find, verify and read them, and restore a run from them."""
