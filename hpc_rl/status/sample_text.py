"""Parts of a kept completion as text, for the terminal and the page of a report."""

import json

from hpc_rl.stats.kept_samples import Sample


def format_column(sample: Sample, name: str) -> str:
    """Return `NAME: VALUE` of a column of the row, with a mark if it was shortened."""
    value = sample.columns[name]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{name}: {text}{' … (shortened)' if name in sample.shortened else ''}"
