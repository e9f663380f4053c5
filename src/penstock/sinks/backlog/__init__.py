"""The backlog: what waits in the store for a sink that is behind."""
