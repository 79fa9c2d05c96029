"""The strategy for fully sharded data parallelism."""
