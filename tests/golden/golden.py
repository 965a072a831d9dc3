"""Golden files: a few texts whole, every other as what differs from one of them.

`<name>` holds a text whole; `<name>.diff` names its parent in the first line, then holds a unified diff.
`pytest tests/golden --update-golden` rewrites them, and a person reads the diff before it is committed.
"""

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path


def stored(texts: Mapping[str, str], parents: Mapping[str, str]) -> dict[str, str]:
    """Return file name -> content. A text without a parent is whole; an equal one is not stored twice."""
    files = {}
    for name, text in texts.items():
        if name not in parents:
            files[name] = text
        else:
            files[f"{name}.diff"] = f"parent {parents[name]}\n{difference(texts[parents[name]], text)}"
    return files


def difference(parent: str, text: str) -> str:
    lines = difflib.unified_diff(parent.splitlines(), text.splitlines(), n=0, lineterm="")
    return "".join(f"{line}\n" for line in list(lines)[2:])


def compare(folder: Path, files: Mapping[str, str], update: bool) -> None:
    """Fail where a file is missing, left over or different."""
    if update:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    known = {path.name: path.read_text() for path in folder.iterdir()} if folder.is_dir() else {}
    assert sorted(files) == sorted(known)
    for name, text in files.items():
        assert text == known[name], f"{name}: read the difference, then --update-golden"
