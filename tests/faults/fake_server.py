"""The server of the supervisor's tests."""

import os
import sys

from fake_role import main

if __name__ == "__main__":
    code = main("server")
    sys.stdout.flush()
    os._exit(code)
