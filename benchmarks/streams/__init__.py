"""Benchmarks of streams: workers that receive and ack, beside pgmq's in the same Postgres."""
