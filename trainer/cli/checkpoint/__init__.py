"""The commands ``paceline checkpoint ...``."""
