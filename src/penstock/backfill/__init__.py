"""Backfills: the rows that tables have already, read in chunks between watermarks."""
