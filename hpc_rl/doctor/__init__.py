"""The checks of `hpc-rl doctor`: functions that look and judge, each with its fix."""
