"""HTTP: health, status and metrics of a run."""
