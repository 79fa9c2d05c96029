"""The module that Python processes started by a program import as ``accelerate``."""
