"""`hpc-rl render`: submit, stopped before the scheduler."""

from __future__ import annotations

from hpc_rl.cli.submit import render_parser as parser
from hpc_rl.cli.submit import run_render as run

__all__ = ["parser", "run"]
