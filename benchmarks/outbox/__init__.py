"""Benchmarks of the outbox: publishing beside a plain INSERT, relaying beside the drain of a table."""
