"""A Hub of the tests' own: real HTTP that huggingface_hub talks to, with faults."""
