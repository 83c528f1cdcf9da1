"""Where looks and steps really happen: over SSH, on this machine, or in a simulated fleet."""
