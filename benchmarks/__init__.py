"""Benchmarks: Penstock beside its peers, on one machine and in one run (`python -m benchmarks`)."""
