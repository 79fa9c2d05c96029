"""Checkpoints: writing, finding, verifying and reading them, and restoring a run from them."""
