"""Connectors: how the API of a provider is read."""
