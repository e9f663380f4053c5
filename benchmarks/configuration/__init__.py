"""Benchmarks of configurations: plan and apply, lists, changes under load, idle ones, takeovers."""
