"""Everything that runs training: the Trainer, the module that users write, the loops, the data and the checkpoints."""
