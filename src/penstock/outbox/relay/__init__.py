"""The relay: delivers what outboxes have, group by group."""
