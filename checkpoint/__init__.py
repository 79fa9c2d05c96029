"""Checkpoints: what they hold (``contents``), how they lie in a file (``file``), modules made from one."""
