"""server.environment: the server's Python environment has the pinned engine, imports, and fits its GPUs."""
