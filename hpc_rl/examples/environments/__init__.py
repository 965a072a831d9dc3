"""Environments as a starting point: one answer, a tool, a game of several turns."""
