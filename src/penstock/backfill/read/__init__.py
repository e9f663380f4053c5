"""The task's side of a backfill: reads one range of a chunk in its snapshot, and makes messages of it.

`task` is Spark's partition, `rows` the COPY, `encode` and `kernels` turn its text into wire batches.
"""
