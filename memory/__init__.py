"""Running out of memory: recognize it, explain it, and retry with smaller batches."""
