"""server.process."""
