"""Door two: an object that people who keep their own loop call from it."""
