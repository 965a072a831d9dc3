"""Prompts in, scored trajectory groups out; the batch log; the role's HTTP service and its client."""
