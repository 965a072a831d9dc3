"""Environments: what they generate with (the gateway) and how their groups arrive."""
