"""Modules that a Python started by a program finds under the names of ``lightning``."""
