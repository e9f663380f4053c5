"""The backfills of a run: which are asked for, which one is read now, and how far it is.

`penstock.streams.backfills` has them in the store, `penstock.postgres.backfill` reads their rows.
"""
