"""API syncs: copies of what SaaS APIs hold, kept up by polling, in a table of records."""
