"""One embedded replica that receives weights over a process group, in a process that can be killed.

`receiving_replica.py TRIAL INDEX MODEL [STALL_AT STALLED_FILE]`: at the bucket of this number it writes the file,
and waits until it is killed. From SIGUSR1 on, it takes a trainer that sends nothing for dead at once.
"""

import asyncio
import signal
import sys
import threading
from pathlib import Path

from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import open_names
from hpc_rl.servers import replica as replica_module
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.embedded.receive import WeightReceiver
from hpc_rl.servers.node_backend import NodeBackend
from hpc_rl.servers.replica import Identity, Replica
from hpc_rl.weight_files.model_copy import ModelCopy


def stall(at: int, file: Path) -> None:
    receive, count = WeightReceiver.receive, iter(range(at))

    def receive_or_stall(self, body):
        if next(count, None) is None:
            file.touch()
            threading.Event().wait()
        return receive(self, body)

    WeightReceiver.receive = receive_or_stall


def main() -> int:
    trial, index, model = Trial(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    replica_module.RECEIVE_LIMIT_S = 600.0
    signal.signal(signal.SIGUSR1, lambda *_: setattr(replica_module, "RECEIVE_LIMIT_S", 0.0))
    if len(sys.argv) > 4:
        stall(int(sys.argv[4]), Path(sys.argv[5]))
    embedded = EmbeddedBackend(EmbeddedConfig(), address="127.0.0.1")
    copy = ModelCopy(trial.dir / f"copy-{index}", trial.weights)
    backend = NodeBackend(embedded, copy, NodeCopies())
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    who = Identity(index, "1.0", 0)
    replica = Replica(backend, trial, open_names(trial), trial.load_tokens(), who, model)
    return asyncio.run(replica.run(stopping))


if __name__ == "__main__":
    sys.exit(main())
