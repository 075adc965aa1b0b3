"""The Hugging Face hub: which names could be on it, whether it can be reached, and putting a folder there."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants
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


def upload(
    folder: Path, repo_id: str, *, commit_message: str | None = None, private: bool | None = None,
    token: bool | str | None = None, revision: str | None = None, create_pr: bool = False,
) -> str:  # fmt: skip
    """Put the files of a folder into a repository of the hub, made if it is not there; returns the commit's address.

    A model card that stands there already is left alone.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    kept = ["README.md"] if api.file_exists(repo_id, "README.md") else None
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    done = api.upload_folder(
        repo_id=repo_id, folder_path=folder, commit_message=commit_message or "Upload a draft head",
        revision=revision, create_pr=create_pr, ignore_patterns=kept,
    )  # fmt: skip
    return str(done)


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
