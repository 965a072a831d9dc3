"""The command line: one module per command with `parser()` and `run(args)`; the invoked one is imported."""
