"""Start a container program with a copy of its image on this node's local disk.

`python -m hpc_rl.roles.local_image LOCAL_DIR IMAGE PROGRAM ARGUMENT...` copies IMAGE, replaces it in the
arguments and executes PROGRAM. The copy stays while a role of the job runs on the node.
"""

import logging
import os
import sys

from hpc_rl.core import log
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.trial import parse_submission
from hpc_rl.roles.node_environment import NodeDirectory


def main() -> None:
    local_dir, image, *argv = sys.argv[1:]
    log.configure("image", "")
    path = image
    try:
        job_id = os.environ.get("SLURM_JOB_ID") or parse_submission(argv[argv.index("--attempt") + 1])
        node = NodeDirectory({**os.environ}, job_id, local_dir)  # the role sets up its own environment
        node.keep_open()
        path = NodeCopies(node.copies).find_path(image)
    except ConfigError as error:  # the role will fail with it
        logging.error("%s", error)
    os.execvp(argv[0], [path if word == image else word for word in argv])


if __name__ == "__main__":
    main()
