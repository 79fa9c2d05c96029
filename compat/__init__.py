"""Replacements for other packages, so that programs written for them run on Paceline."""
