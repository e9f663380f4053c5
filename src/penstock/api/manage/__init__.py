"""The Management API, a module a noun: what operators, their tooling and a console call."""
