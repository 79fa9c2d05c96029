"""Find a learning rate or a batch size by running trials on the module itself, then restore all other state."""
