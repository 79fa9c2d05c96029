"""What is slow in a run, why, and what to change: measured while it runs, at almost no cost."""
