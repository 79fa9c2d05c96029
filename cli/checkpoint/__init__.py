"""The ``paceline checkpoint ...`` commands."""
