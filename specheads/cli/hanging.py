"""Lines of a name and a value, which continue below the value where a terminal is narrow."""

from __future__ import annotations

import shutil
import sys
import textwrap


def print_hanging(line: str, column: int) -> None:
    """Print a line. In a terminal that is narrower it is broken between words, and continues at `column`."""
    if not sys.stdout.isatty():
        print(line)
        return
    width = max(column + 20, shutil.get_terminal_size().columns)
    parts = textwrap.wrap(line[column:], width - column, break_long_words=False, break_on_hyphens=False)
    print(line[:column].rstrip() if not parts else line[:column] + f"\n{' ' * column}".join(parts))
