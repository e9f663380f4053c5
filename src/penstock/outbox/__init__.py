"""The transactional outbox: SQL in the application's database, and the relay that delivers it."""
