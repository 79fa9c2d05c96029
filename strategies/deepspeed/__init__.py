"""The strategy that shards training with DeepSpeed's ZeRO."""
