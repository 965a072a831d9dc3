"""Environments to begin from: one answer, a tool, a game of several turns."""
