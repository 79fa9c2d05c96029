"""Diagnoses performance at almost no cost: finds what is slow in a run, why it is slow, and what to change."""
