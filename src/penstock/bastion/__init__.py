"""Connections through a bastion: an SSH server that forwards to what lies behind it."""
