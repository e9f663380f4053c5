"""The records table: what the syncs hold of the objects of APIs."""
