"""Fenced blocks of Markdown, so that what a document shows can be run."""

import re


def blocks(text, language):
    """What is between ```language and ``` in the text, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
