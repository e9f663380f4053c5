"""The NATS sink: publishes to JetStream."""
