"""Syncs beside dlt: what a backfill, a poll and many syncs take."""
