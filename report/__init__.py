"""The record of a run and its report page."""
