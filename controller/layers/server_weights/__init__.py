"""server.weights: every file of the pinned revision is there, with the right size and content."""
