"""Datasets: rows from files, their deterministic order over epochs, and their tokens. No torch here."""
