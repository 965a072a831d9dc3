"""One embedded replica in a process that can be killed: `replica_process.py TRIAL INDEX MODEL [COUNT_FILE]`.

It writes the number of tokens that its engine has sampled to COUNT_FILE all the time. Without a MODEL (""), it shares
its units with a trainer.
"""

import asyncio
import mmap
import signal
import sys
import threading
import time
from pathlib import Path

from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import open_names
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.replica import Identity, Replica


def count(backend: EmbeddedBackend, path: Path) -> None:
    path.write_bytes(bytes(8))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        while True:
            if backend._engine is not None:
                memory[:] = backend._engine.num_tokens.to_bytes(8, "little")
            time.sleep(0.002)


def main() -> int:
    trial, index, model = Trial(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    backend = EmbeddedBackend(EmbeddedConfig(batch_invariant=True))
    if len(sys.argv) > 4:
        threading.Thread(target=count, args=(backend, Path(sys.argv[4])), daemon=True).start()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    who = Identity(index, "1.0", 0)
    tokens = trial.load_tokens()
    replica = Replica(backend, trial, open_names(trial), tokens, who, model, shares_gpus=not model)
    return asyncio.run(replica.run(stopping))


if __name__ == "__main__":
    sys.exit(main())
