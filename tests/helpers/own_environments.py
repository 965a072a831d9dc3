"""Environments of a test with packages that the others do not have."""

import subprocess
import sysconfig
import venv
from pathlib import Path

from patience import extend


def make_environment(folder: Path, *packages: str) -> Path:
    """Install packages into a new environment, which also sees the packages of this one; return its Python."""
    venv.create(folder, with_pip=True)
    (place,) = folder.glob("lib/python*/site-packages")
    (place / "tests.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    argv = [folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=extend(600))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin/python"
