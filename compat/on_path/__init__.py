"""A folder for each replaced package, with modules of the same names, for Python processes that a program starts."""
