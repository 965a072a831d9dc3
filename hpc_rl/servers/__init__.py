"""Generation servers.

To add a backend, write a class with the protocol `Backend` (base.py), add it here, and add a row to
core/backends.py.
"""

# name in allocation_mode -> `module:class`; the module is imported by the role that uses it
BACKENDS = {
    "embedded": "hpc_rl.servers.embedded.backend:EmbeddedBackend",
    "sglang": "hpc_rl.servers.sglang:SGLangBackend",
    "vllm": "hpc_rl.servers.vllm:VLLMBackend",
}
