"""Records as lists of dicts, which become data frames where pandas or polars is installed."""

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from hpc_rl.api.display import make_table
from hpc_rl.core.errors import HpcRlError

LIBRARIES = ("pandas", "polars")  # the first that is installed makes frames


class Records(list[dict[str, Any]]):
    """A list of records: dicts of plain values. A record may lack keys that others have."""

    @property
    def columns(self) -> list[str]:
        """The keys of all records, in the order of their first appearance."""
        return list(dict.fromkeys(key for record in self for key in record))

    def column(self, name: str) -> list[Any]:
        """Return the values of a key, None where a record lacks it."""
        return [record.get(name) for record in self]

    def frame(self) -> Any:
        """Return a data frame of pandas if it is installed, else of polars.

        Raises HpcRlError if neither is installed.
        """
        for library in LIBRARIES:
            if importlib.util.find_spec(library) is not None:
                return self._make_frame(library)
        raise HpcRlError("data frames need pandas or polars, and neither is installed: pip install pandas")

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`, one row per record. Raises HpcRlError if pandas is not installed."""
        return self._make_frame("pandas")

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame`, one row per record. Raises HpcRlError if polars is not installed."""
        return self._make_frame("polars")

    def _make_frame(self, library: str) -> Any:
        try:
            module = importlib.import_module(library)
        except ImportError as error:
            raise HpcRlError(f"{library} can't be imported ({error}): pip install {library}") from error
        columns = {name: self.column(name) for name in self.columns}
        # polars guesses a column's type from its first values, which may be None
        settings: dict[str, Any] = {"strict": False} if library == "polars" else {}
        return module.DataFrame(columns, **settings)

    def _repr_html_(self) -> str:
        names = self.columns
        return make_table(names, [[record.get(name) for name in names] for record in self])


def make_records(rows: Iterable[dict[str, Any]]) -> Records:
    """Return copies of rows as records."""
    return Records(dict(row) for row in rows)
