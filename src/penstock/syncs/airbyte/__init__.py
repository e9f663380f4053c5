"""Manifests of Airbyte: airbyte-cdk in an environment and a process of its own."""
