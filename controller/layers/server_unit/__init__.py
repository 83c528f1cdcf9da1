"""server.unit."""
