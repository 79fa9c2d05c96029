"""A folder for each replaced package, with modules of its names, for the processes that a program starts."""
