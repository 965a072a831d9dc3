#!/usr/bin/env bash
# Install a real SGLang for CPU tests into a virtual environment of its own (about 2.5 GB, some minutes).
#
#   tests/sglang/install.sh [DIR [pip options...]]     DIR: .venv-sglang in the checkout by default
#
# The pip options say where the CPU build of torch comes from, where pip's own configuration does not: --find-links DIR,
# --extra-index-url URL. PYTHON names the interpreter (default python3; the pins were tried on CPython 3.11, x86-64).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-$here/../../.venv-sglang}
shift || true

if [ -f "$venv/.installed" ] && cmp -s "$venv/.installed" "$here/requirements.txt"; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt" "$@"
torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
case $torch in
*+cpu) ;;
*) echo "warning: torch $torch is not a CPU build; give pip a source of +cpu builds (see the head of this script)" >&2 ;;
esac
cp "$here/requirements.txt" "$venv/.installed"
echo "SGLang is installed in $venv (torch $torch)"
