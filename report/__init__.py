"""What a run leaves behind: its record, and the page about it."""
