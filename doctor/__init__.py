"""Performance diagnosis: finds what is slow in a run, why, and what to change, at almost no cost."""
