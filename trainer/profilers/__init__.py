"""What looks at where the time of a run goes: by name in ``Trainer(profiler=...)``, or an object of one's own."""
