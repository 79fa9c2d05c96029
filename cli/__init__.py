"""The command line: one file a command, which is imported when its command is given."""
