"""Benchmark of the console over a store with many sinks, consumers and messages."""
