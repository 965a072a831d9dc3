"""Disconnect one option from the code that it steers: what reads it gets the default, whatever was configured.

Only the loader, which builds, checks and stores configurations, still sees the configured value, and so do
tests: one that compares loaded values shows nothing of an effect. A test that shows what an option does must fail
where the option is disconnected.
"""

import dataclasses
import sys
from typing import Any

SEES_VALUES = ("hpc_rl.config.loading", "hpc_rl.config.rules", "test_")
TRANSPARENT = ("dataclasses", "copy", __name__)  # their callers count
UNSET = object()


class Disconnected:
    """A data descriptor in place of a field of a dataclass without slots."""

    def __init__(self, cls: type, field: dataclasses.Field) -> None:
        self.name, self.field = field.name, field
        self.default = vars(cls).get(field.name, UNSET)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            if self.default is UNSET:
                raise AttributeError(self.name)
            return self.default
        value = vars(instance)[self.name]
        return value if _reader().startswith(SEES_VALUES) else without(self.field, value)


def _reader() -> str:
    """Return the name of the module that reads."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "") in TRANSPARENT and frame.f_back is not None:
        # dataclasses.replace copies values; asdict is a read by its caller
        if frame.f_code.co_name in ("replace", "__deepcopy__", "_replace"):
            return SEES_VALUES[0]
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


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


def owner_of(cls: type, name: str) -> type:
    """Return the class that declares a field, which all that inherit it share."""
    return next(base for base in reversed(cls.__mro__) if name in vars(base).get("__annotations__", ()))


def disconnect(cls: type, name: str) -> None:
    """Disconnect a field for the rest of this process. The class must be a dataclass without slots."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    owner = owner_of(cls, name)
    setattr(owner, name, Disconnected(owner, field))
