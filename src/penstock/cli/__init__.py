"""The command line: a file a command; those of a few lines are in `main`."""
