"""What drives: reads spec files, looks at hosts, performs steps. Decides nothing that the core could decide."""
