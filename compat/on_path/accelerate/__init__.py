"""The module that a program's child processes import as ``accelerate``."""
