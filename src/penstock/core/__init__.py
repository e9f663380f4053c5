"""The ground floor: messages, errors, deliveries, health. It imports nothing above it."""
