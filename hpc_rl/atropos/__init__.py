"""Environments: tasks that run outside the trial, send it scored groups, and sample from its servers.

    from hpc_rl.atropos import Environment

    class Sums(Environment):
        items = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]

        async def episode(self, item, conversation):
            return float((await conversation.reply()).strip() == item["answer"])

`hpc-rl env serve sums.py` runs it. The protocol is Atropos's: an environment written for atroposlib
works with hpc-rl, and an environment of hpc-rl works with atroposlib's API server.
"""

from hpc_rl.atropos.environment import Environment
from hpc_rl.atropos.groups import ScoredGroup
from hpc_rl.atropos.settings import APIServerConfig, EnvConfig, EnvironmentSettings

__all__ = ["APIServerConfig", "EnvConfig", "Environment", "EnvironmentSettings", "ScoredGroup"]
