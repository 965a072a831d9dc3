"""The command line: one module per command, each with `parser()` and `run(...)`; only the invoked one is imported."""
