"""Train engines.

To add one, write a class with the protocol `Engine` (base.py), add it here, and add a row to
core/backends.py.
"""

# name in allocation_mode -> `module:class`; the module is imported by the trainer that uses it
ENGINES = {
    "fsdp": "hpc_rl.engines.fsdp.engine:FSDPEngine",
    "megatron": "hpc_rl.engines.megatron.engine:MegatronEngine",
}
