"""What each release wrote on hosts, kept so that the next ones leave it alone."""
