"""server.output: what the server says makes sense, as fast as it should."""
