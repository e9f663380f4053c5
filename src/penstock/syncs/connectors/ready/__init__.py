"""Ready connectors: settings of `rest`, and what these can't express."""
