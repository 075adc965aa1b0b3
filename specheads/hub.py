"""Names of models on the Hugging Face hub: which could be one at all, and whether the hub can be reached."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from transformers import PreTrainedModel


def may_be_repository(name: str) -> bool:
    """owner/name, the only form in which heads can be on the hub."""
    return re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) is not None


def options(name: str) -> dict[str, Any]:
    """What to load `name` with: from what was downloaded before, where it is on the hub and that cannot be reached.

    The hub's client would try again for half a minute for each file, and say so line by line.
    """
    return {} if Path(name).exists() or _resolves() else {"local_files_only": True}


def _resolves() -> bool:
    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or not host or urllib.request.getproxies():
        return True  # the client knows what to do, or a proxy resolves names
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def commit_of(model: PreTrainedModel) -> str | None:
    """The commit that a model of the hub was loaded from; None where that cannot be told."""
    if recorded := getattr(model.config, "_commit_hash", None):
        return recorded
    # transformers >= 5.23 records it nowhere: what is left is a repository of which one commit alone is here.
    name = getattr(model, "name_or_path", None)
    if not name or Path(name).exists():
        return None
    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    commits = [path.parent.name for path in snapshots.glob("*/config.json")]
    return commits[0] if len(commits) == 1 else None
