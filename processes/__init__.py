"""Processes: how they start, who launched them, how they fail, hang and stop, and the machine they run on."""
