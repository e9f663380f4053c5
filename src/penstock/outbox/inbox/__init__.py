"""Inboxes: takes messages of JetStream into a database, each once."""
