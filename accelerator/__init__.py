"""The Accelerator, for users who write their own training loop."""
