"""Reinforcement-learning post-training of language models, with Slurm as the distributed engine."""

__version__ = "0.1.0"
