"""The command line: one module a command, imported only when that command runs. Libraries load inside the functions."""
