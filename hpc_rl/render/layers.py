"""Layers of templates: a trial's own directory, the site's, ours. Each may override blocks of the one below it.

An override says `{% extends "below/sbatch/trial.sbatch.j2" %}`: `below` is whatever the next layer down has of that name, so that
a person's override and the site's add up. `builtin/<name>` is ours, whatever lies above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from jinja2.loaders import split_template_path

BELOW, BUILTIN = "below/", "builtin/"


class Layers(jinja2.BaseLoader):
    """Args:
    folders: Directories, highest precedence first; the last one is ours.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)

    def find(self, name: str) -> tuple[int, Path] | None:
        """The layer that has a template, and its file. `@2/<name>` begins to look at layer 2."""
        first = 0
        if name.startswith(BUILTIN):
            first, name = len(self.folders) - 1, name.removeprefix(BUILTIN)
        elif name.startswith("@"):
            number, _, name = name[1:].partition("/")
            first = int(number)
        parts = split_template_path(name)  # refuses what would lead out of the folder
        for layer, folder in list(enumerate(self.folders))[first:]:
            path = folder.joinpath(*parts)
            if path.is_file():
                return layer, path
        return None

    def overrides(self, name: str) -> list[Path]:
        """Files above ours that have a say in a template, highest first."""
        return [path for folder in self.folders[:-1] if (path := folder / name).is_file()]

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str | None, Callable[[], bool] | None]:
        found = self.find(template)
        if found is None:
            raise jinja2.TemplateNotFound(template)
        return found[1].read_text(encoding="utf-8"), str(found[1]), None

    def below(self, template: str, parent: str) -> str:
        """What `below/…` means in `parent`."""
        name = template.removeprefix(BELOW)
        found = self.find(parent)
        if found is None or found[0] + 1 >= len(self.folders):
            raise jinja2.TemplateNotFound(template, f"nothing lies below {parent}")
        return f"@{found[0] + 1}/{name}"


class LayeredEnvironment(jinja2.Environment):
    """An environment whose templates may name what lies below them."""

    def join_path(self, template: str, parent: str) -> str:
        if template.startswith(BELOW) and isinstance(self.loader, Layers):
            return self.loader.below(template, parent)
        return template
