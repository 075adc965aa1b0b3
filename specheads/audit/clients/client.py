"""What an audit asks of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specheads.audit.settings import Settings


class Client(Protocol):
    """name: of the server, for the report."""

    name: str

    def ask(self, prompts: Sequence[list[int]], settings: Settings) -> list[list[int]]:
        """The tokens that the server writes after each prompt, the EOS included where it ended the text. Prompts of one
        call are asked for together, so that the server batches them."""
        ...
