"""Modules that a program's child processes import instead of the real packages, in one folder per package."""
