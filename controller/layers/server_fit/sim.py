"""server.fit in the simulated fleet: it asks hosts for nothing and does nothing; the fleet's Hub tells of models."""
