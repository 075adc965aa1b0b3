"""`specheads report`: one HTML file of training runs, benches, sweeps and step costs."""

from __future__ import annotations

from typing import Any

from specheads.bench.web import page
from specheads.cli.app import output
from specheads.cli.errors import refuse_folder
from specheads.cli.options.report import ReportOptions
from specheads.pictures import require_matplotlib


def run(options: ReportOptions) -> None:
    """Write the page and, if asked, its pictures, and print where they are."""
    refuse_folder(options.out, "--out")
    require_matplotlib()
    page.write(options.out, options.runs)
    drawn = page.draw_all(options.runs, options.pictures) if options.pictures is not None else []
    record: dict[str, Any] = {
        "page": str(options.out), "runs": [str(run) for run in options.runs], "pictures": [str(path) for path in drawn],
    }  # fmt: skip
    output(record, show, options.as_json)


def show(record: dict[str, Any]) -> None:
    print("written:", ", ".join([record["page"], *record["pictures"]]))
