"""reconcile: a desired-state controller for machines that serve language models."""

__version__ = "0.1.0"
