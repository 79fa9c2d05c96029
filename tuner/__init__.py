"""Trials on a run's own module that find a learning rate or a batch size, and leave nothing else behind."""
