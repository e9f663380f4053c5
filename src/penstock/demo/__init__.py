"""`penstock demo`: a shop in Postgres, the real pipeline, and a consumer that checks it."""

from penstock.demo.session import run

__all__ = ["run"]
