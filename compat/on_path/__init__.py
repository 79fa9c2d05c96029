"""Modules that Python processes started by a program import instead of the real packages, in a folder per package."""
