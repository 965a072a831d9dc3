"""Disconnect one option from the code that it steers: what reads it gets the default, whatever was configured.

All places that read it are disconnected, or a single one.

What builds, checks, stores, shows and compares configurations still sees the configured value, and so do tests and
their helpers: a test that compares loaded values, or hands them to the code itself, shows nothing of an effect.
A test that shows what an option does must fail where the option is disconnected.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_rl.config.load import load

TESTS = str(Path(__file__).resolve().parents[1]) + "/"
SEES_VALUES = tuple(f"hpc_rl.config.{module}" for module in ("load", "rules", "show", "changes", "snapshot"))
# The callers of these count.
TRANSPARENT = ("dataclasses", "copy", __name__)
TRANSPARENT_FUNCTIONS = (
    *("get_value", "replace_value", "list_open_variables", "list_secret_variables"),
    *("__eq__", "__repr__", "__hash__"),
)
UNSET = object()


class Disconnected:
    """A data descriptor in place of a field of a dataclass without slots; `only` in instances of a class.

    With `is_cut` the value is cut where that returns true of a file and a line; readers of vars() see the value.
    """

    def __init__(
        self,
        owner: type,
        field: dataclasses.Field,
        only: type,
        is_cut: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.name, self.field, self.only, self.is_cut = field.name, field, only, is_cut
        self.default = vars(owner).get(field.name, UNSET)
        self.values: dict[
            int, tuple[Any, Any]
        ] = {}  # by id, with the instance, so that it stays the only one

    def __set__(self, instance: Any, value: Any) -> None:
        self.values[id(instance)] = instance, value
        # what reads vars()
        cut = isinstance(instance, self.only) and self.is_cut is None
        vars(instance)[self.name] = without(self.field, value) if cut else value

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            if self.default is UNSET:
                raise AttributeError(self.name)
            return self.default
        if id(instance) not in self.values:  # it is older than this, or a copy
            self.__set__(instance, vars(instance)[self.name])
        place, value = _reader(), self.values[id(instance)][1]
        if place is None:
            return value
        if self.is_cut is None:
            return vars(instance)[self.name]
        return (
            without(self.field, value) if isinstance(instance, self.only) and self.is_cut(*place) else value
        )


def _reader() -> tuple[str, int] | None:
    """Return the file and the line of the product that read; None for the loader, or a test."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        # dataclasses.replace copies values; asdict is a read by its caller
        if module == "dataclasses" and function in ("replace", "_replace"):
            return None
        if module not in TRANSPARENT and function not in TRANSPARENT_FUNCTIONS:
            break
        frame = frame.f_back
    if module.startswith(SEES_VALUES) or frame.f_code.co_filename.startswith(TESTS):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def without(field: dataclasses.Field, value: Any) -> Any:
    """Return what a field is where nothing was configured; of a required one a value that is not this one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is not dataclasses.MISSING:
        return field.default
    if dataclasses.is_dataclass(value):
        return _bare(type(value))
    return value + type(value)(1) if isinstance(value, int | float) else "disconnected"


def _bare(cls: type) -> Any:
    """Return a section in which only the required fields have values of their own."""
    required = {
        field.name: "disconnected"
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return cls(**required)


def disconnect(
    cls: type, name: str, whole_family: bool = False, is_cut: Callable[[str, int], bool] | None = None
) -> None:
    """Disconnect a field in the instances of a class for the rest of this process.

    `whole_family`: and in those of the class that it is inherited from. The class must be a dataclass without
    slots. `is_cut` says which places, by file and line; None means all.
    """
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", ()))
    setattr(owner, name, Disconnected(owner, field, owner if whole_family else cls, is_cut))


def disconnect_in_loader(option: str) -> None:
    """Disconnect an option that only the loader reads, which then never sees it."""
    merge = load.merge
    load.merge = lambda sources: {name: item for name, item in merge(sources).items() if name != option}
