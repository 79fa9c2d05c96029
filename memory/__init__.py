"""Running out of memory: recognized, explained, and tried again with less."""
