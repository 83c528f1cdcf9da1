"""server.placement."""
