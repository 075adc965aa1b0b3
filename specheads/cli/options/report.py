"""The options of report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specheads.cli.options.shared import Output
from specheads.options import argument, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Output):
    """Write one HTML file of runs, benches, audits and texts.

    Curves, what was accepted by depth, position and node of a tree, where the time goes, all tables, configuration,
    environment and command; of `audit`, `adapt` and `generate`, what they print with --json. The file needs no network
    and no other file, and reads on a phone, in light and dark.

    --pictures writes the pictures as files, too, drawn from what the runs saved: NAME.png, NAME-dark.png, and NAME.svg,
    which is light or dark as its reader's screen is. Several training runs are drawn beside one another, too.

    \b
    Examples:
      specheads report runs/eagle3
      specheads report runs/eagle3 runs/bench --out eagle3.html
      specheads report runs/bench --pictures talk
    """

    runs: list[Path] = argument(
        "RUN...", "Folders of `specheads train` or `bench --out`; files of `tune` or of --json."
    )
    out: Path = option(Path("report.html"), "File to write.")
    pictures: Path | None = option(None, "Folder to write the pictures to, as PNG and SVG.", metavar="FOLDER")
