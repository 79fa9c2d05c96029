"""Recognize and explain out-of-memory errors, and retry with smaller batches."""
