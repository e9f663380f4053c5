"""The Spark side: the session, the source, the sink, the pipeline."""
