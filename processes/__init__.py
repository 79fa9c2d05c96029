"""Processes: how they start, which launcher started them, how they fail, hang and stop, and the machine they run on."""
