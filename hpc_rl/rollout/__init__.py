"""Rollout: prompts in, scored trajectory groups out; the ledger and the batch log; the role's HTTP service and its client."""
