"""HTTP: what workers, operators and probes call."""
