"""The expression language in Spark: columns that give what Postgres gives."""
