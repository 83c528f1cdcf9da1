"""server.health: ready within its budget, and moving when it is busy."""
