"""How long a look at a hundred hosts takes, beside the tools that people use for it."""
