"""Models whose weights come from files that others wrote."""
