"""Starts a program that names a container image with the image's copy on this node's own disk in its place.

`python -m hpc_rl.roles.local_image LOCAL_DIR IMAGE PROGRAM ARGUMENT...` gives way to PROGRAM. The copy stays
while a role of the job runs on the node.
"""

import logging
import os
import sys

from hpc_rl.core import log
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.trial import submission_of
from hpc_rl.roles.node_environment import NodeDirectory


def main() -> None:
    local_dir, image, *argv = sys.argv[1:]
    log.setup("image", "")
    path = image
    try:
        job_id = os.environ.get("SLURM_JOB_ID") or submission_of(argv[argv.index("--attempt") + 1])
        node = NodeDirectory({**os.environ}, job_id, local_dir)  # the role sets the environment of its own
        node.keep_open()
        path = NodeCopies(node.copies).path_of(image)
    except ConfigError as error:  # the role will end by it
        logging.error("%s", error)
    os.execvp(argv[0], [path if word == image else word for word in argv])


if __name__ == "__main__":
    main()
