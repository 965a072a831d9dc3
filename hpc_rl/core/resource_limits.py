"""Resource limits of this process, which its children inherit."""

import contextlib
import resource

# Programs that loop over every possible descriptor become slow beyond this.
MAX_OPEN_FILES = 1 << 20


def raise_limits() -> None:
    """Raise the soft limits of open files and locked memory to the hard ones; allow no core dumps."""
    for number, most in ((resource.RLIMIT_NOFILE, MAX_OPEN_FILES), (resource.RLIMIT_MEMLOCK, None)):
        soft, hard = resource.getrlimit(number)
        wanted = hard
        if most is not None and (hard == resource.RLIM_INFINITY or hard > most):
            wanted = most
        # A container may forbid this, even up to the hard limit.
        with contextlib.suppress(OSError, ValueError):
            if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
                resource.setrlimit(number, (wanted, hard))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
