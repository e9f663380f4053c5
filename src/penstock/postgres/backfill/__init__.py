"""Backfills: a table's rows as messages that fit between those of the WAL.

`backfiller.Backfiller` plans chunks beside a running capture, `read.read_range` reads a chunk's ranges
in Spark's tasks; `spec` and `events` have the words that they share.
"""
