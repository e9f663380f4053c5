"""Where messages go: NATS JetStream, streams in the store, and the backlogs of sinks that are away."""
