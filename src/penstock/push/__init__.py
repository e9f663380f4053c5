"""Messages delivered to webhooks: consumers of type `webhook`."""
