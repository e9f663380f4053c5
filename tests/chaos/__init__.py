"""The fault test: writers commit numbered changes while everything is killed in turn."""
