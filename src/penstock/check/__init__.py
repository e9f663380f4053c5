"""What may be wrong before anything runs: `penstock check`."""
