"""The command line. Each command has a file, imported only when the command runs."""
