"""Tries on a run's own module: which learning rate, which batch size. Nothing of a trial is left behind."""
