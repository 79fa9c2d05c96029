"""Door two: what serves people who keep their own training loop."""
