"""Door two: the Accelerator, for people who keep their own training loop."""
