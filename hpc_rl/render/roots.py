"""Where templates lie: in the wheel, or beside the package in a checkout or an editable install. Nothing else is looked for."""

from __future__ import annotations

from pathlib import Path


def template_root() -> Path:
    """The folder that holds our `templates/` and `sbatch/`."""
    package = Path(__file__).resolve().parents[1]
    packaged = (
        package / "_data"
    )  # in a wheel; a clone or an editable install has the folders beside the package
    return packaged if packaged.is_dir() else package.parent
