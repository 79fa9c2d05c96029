"""Modules with the names of replaced packages; this folder is on the path of processes that a program starts."""
