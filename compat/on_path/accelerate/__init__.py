"""The module that a Python started by a program finds under the name ``accelerate``."""
