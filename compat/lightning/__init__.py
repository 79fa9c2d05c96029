"""Replaces the package ``lightning``, so that programs and libraries written for it run on Paceline."""
