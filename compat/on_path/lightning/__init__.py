"""The modules that a program's child processes import as ``lightning`` and under Lightning's other names."""
