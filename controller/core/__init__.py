"""The pure core: from what is wanted and what is seen to what may be done now. No clock, no network, no files."""
