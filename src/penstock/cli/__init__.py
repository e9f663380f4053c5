"""The command line: a file a command. `run`, `api`, `push` and `demo`, of a few lines, are in `main`."""
