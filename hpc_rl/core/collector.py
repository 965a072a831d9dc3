"""Python's garbage collector while libraries are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Collect no garbage inside; at the end, exempt all objects from later collections.

    PyTorch and transformers make many objects that stay. To look at them for garbage again and again takes a
    seventh of the time of their import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
