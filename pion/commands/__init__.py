"""One module per command family, each a plugin."""
