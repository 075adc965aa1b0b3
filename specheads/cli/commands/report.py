"""`specheads report`: one HTML file of training runs, benches, sweeps and step costs."""

from __future__ import annotations

from typing import Any

from specheads.bench.web import page
from specheads.cli.app import output
from specheads.cli.errors import refuse_folder
from specheads.cli.options.report import ReportOptions


def run(options: ReportOptions) -> None:
    """Write the page, and print where it is."""
    refuse_folder(options.out, "--out")
    page.write(options.out, options.runs)
    record: dict[str, Any] = {"page": str(options.out), "runs": [str(run) for run in options.runs]}
    output(record, lambda record: print(f"written: {record['page']}"), options.as_json)
