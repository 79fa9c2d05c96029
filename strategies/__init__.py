"""Where tensors live, who talks to whom, and in which dtypes a run computes."""
