"""`hpc-rl doctor`: facts of a machine and of a directory are gathered here, and judged by pure functions, each with its fix."""
