"""What runs a training: the Trainer, the module a user writes, the loops, the data and the checkpoints."""
