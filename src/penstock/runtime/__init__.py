"""The run: what starts, what it knows of itself, what it recovers."""
