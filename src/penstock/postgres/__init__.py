"""All that speaks Postgres replication: the pgoutput parser, values to JSON, slots, capture."""
