"""The rows of a backfill's chunk: `rows` reads them, `encode` makes messages of their text."""
