"""`python -m penstock` is the command `penstock`."""

from penstock.cli import app

if __name__ == "__main__":
    app()
