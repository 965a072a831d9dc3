"""The running hpc_rl as a zip file that Python imports from: a queued trial keeps the code of its submission.

Only `.py` files: a role needs no templates, and compiled files belong to one interpreter.
"""

import functools
import hashlib
import io
import zipfile
from pathlib import Path

import hpc_rl

_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@functools.cache
def build() -> tuple[str, bytes]:
    """Return file name (version, hash) and content; equal sources give equal bytes. Raises OSError."""
    sources = _sources(Path(hpc_rl.__file__).parent)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    return f"hpc_rl-{hpc_rl.__version__}-{hashlib.sha256(content).hexdigest()[:12]}.zip", content


def _sources(package: Path) -> dict[str, bytes]:
    if not package.is_dir():
        # This process itself runs from such a zip: package is <zip>/hpc_rl.
        with zipfile.ZipFile(package.parent) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    paths = (path for path in package.rglob("*.py") if "_data" not in path.parts)
    return {str(Path("hpc_rl") / path.relative_to(package)): path.read_bytes() for path in paths}
