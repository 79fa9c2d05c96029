"""The modules that Python processes started by a program import as ``lightning`` and its other names."""
