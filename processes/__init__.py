"""Processes: how they are started, who started them, how they fail, hang and stop, and the machine they run on."""
