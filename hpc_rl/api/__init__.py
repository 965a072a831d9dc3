"""The Python API, which `hpc_rl` re-exports. It calls the functions of `trials` that commands call."""
