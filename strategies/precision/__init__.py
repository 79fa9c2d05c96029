"""Which dtypes a run computes in, and how fp16's loss is scaled. A strategy holds one of these."""
