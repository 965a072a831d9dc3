"""Pack the running hpc_rl as an importable zip file: a queued trial keeps the code of its submission.

It holds the `.py` files (roles need no templates), and compiled files for the job script: they halve the
time before the script can receive signals. Another version of Python ignores compiled files.
"""

import functools
import hashlib
import importlib.util
import io
import marshal
import zipfile
from pathlib import Path

import hpc_rl

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
COMPILED: tuple[str, ...] = (
    "__init__",
    "core/__init__",
    "core/errors",
    "core/resource_limits",
    "roles/__init__",
    "roles/job",
)
COMPILED += ("supervise/__init__", "supervise/job_hooks", "supervise/job_loop", "supervise/job_policy")
COMPILED += ("supervise/job_runner",)
_NEVER_CHECKED = 1  # flags of a compiled file with the hash of its source


@functools.cache
def build() -> tuple[str, bytes]:
    """Return file name (version, hash) and content; equal sources give equal names. Raises OSError."""
    sources = _list_sources(Path(hpc_rl.__file__).parent)
    digest = hashlib.sha256()
    for name, data in sorted(sources.items()):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    names = [f"hpc_rl/{module}.py" for module in COMPILED]
    files = sources | {f"{name}c": _compile(name, sources[name]) for name in names}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return f"hpc_rl-{hpc_rl.__version__}-{digest.hexdigest()[:12]}.zip", buffer.getvalue()


def _compile(name: str, source: bytes) -> bytes:
    """Return a compiled file that needs no check of the source's time: an archive keeps no useful times."""
    code = compile(source, name, "exec", dont_inherit=True)
    header = importlib.util.MAGIC_NUMBER + _NEVER_CHECKED.to_bytes(4, "little")
    return header + importlib.util.source_hash(source) + marshal.dumps(code)


def _list_sources(package: Path) -> dict[str, bytes]:
    if not package.is_dir():
        # This process itself runs from such a zip: package is <zip>/hpc_rl.
        with zipfile.ZipFile(package.parent) as archive:
            return {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    paths = (path for path in package.rglob("*.py") if "_data" not in path.parts)
    return {str(Path("hpc_rl") / path.relative_to(package)): path.read_bytes() for path in paths}
