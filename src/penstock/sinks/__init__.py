"""One file per sink, behind the protocol in `base`."""
