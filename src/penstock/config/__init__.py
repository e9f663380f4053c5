"""The configuration: the file, the settings of each kind of sink, source and consumer."""
