"""Performance diagnosis: finds what is slow in a run, why it is slow, and what to change, at almost no cost."""
