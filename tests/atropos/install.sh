#!/usr/bin/env bash
# Install a real atroposlib into a virtual environment of its own (about 1 GB, some minutes).
#
#   tests/atropos/install.sh [DIR [pip options...]]     DIR: .venv-atropos in the checkout by default
#
# PYTHON names the interpreter (default python3; the pins were tried on CPython 3.11, x86-64).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-$here/../../.venv-atropos}
shift || true

if [ -f "$venv/.installed" ] && cmp -s "$venv/.installed" "$here/requirements.txt"; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt" "$@"
cp "$here/requirements.txt" "$venv/.installed"
echo "atroposlib is installed in $venv"
