"""The report and the docs in a headless Chromium, at the widths of a screen and of a phone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import open_tab
from patience import extend
from stored_trials import folder, trial_of

from hpc_rl.cli.__main__ import main

__all__ = ["folder"]

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1280, 390)
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def write_report(folder: Path, *names: str) -> Path:
    page = folder / f"{'-'.join(names)}.html"
    assert main(["report", *(str(trial_of(folder, name).dir) for name in names), "--html", str(page)]) == 0
    return page


@pytest.mark.parametrize("names", [("finished",), ("finished", "stopped")], ids=["one", "two"])
async def test_the_report_fits_and_draws(folder, tmp_path, names):
    page = write_report(folder, *names)
    async with open_tab(tmp_path) as tab:
        for width in WIDTHS:
            seen = await tab.open(page, width)
            assert seen["scroll"] <= seen["room"] == width and not seen["wide"], (width, seen)
            drawn = await tab.evaluate(
                "[...document.querySelectorAll('.js-plotly-plot')]"
                ".map(one => [one.id, one.querySelectorAll('svg.main-svg').length])"
            )
            assert len(drawn) >= 6 and all(count for _, count in drawn), drawn
        assert not tab.complaints


async def test_every_page_of_the_docs_fits(tmp_path):
    site = tmp_path / "site"
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    argv = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    subprocess.run(argv, cwd=ROOT, env=environ, check=True, capture_output=True, timeout=extend(120))
    pages = [
        page for page in sorted(site.rglob("*.html")) if page.name != "404.html"
    ]  # its links are absolute
    assert len(pages) > 40
    wrong = []
    async with open_tab(tmp_path) as tab:
        for width in WIDTHS:
            for page in pages:
                seen = await tab.open(page, width)
                if seen["scroll"] > seen["room"] or seen["wide"]:
                    wrong.append((width, page.name, seen["scroll"], seen["wide"]))
        assert not wrong and not tab.complaints
