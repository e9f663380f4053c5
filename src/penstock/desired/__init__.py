"""The desired state: the configuration as the store has it, and how files change it."""
