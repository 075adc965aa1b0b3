"""Names of models and data (local paths or Hugging Face hub ids), and uploading a folder to the hub."""

from __future__ import annotations

import difflib
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from specheads.options import reason

_SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints"  # in a clone; a wheel has none
THERE, ABSENT, UNREACHABLE = "there", "absent", "unreachable"
_HOLDS = 60.0  # seconds for which the hub's answer is cached
_answers: dict[Any, tuple[float, tuple[str, str]]] = {}


def may_be_repository(name: str) -> bool:
    """Does this have the form owner/name, the only form of a hub id that a head can have?"""
    return re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) is not None


def hub_options(name: Any, kind: str = "model", **hub: Any) -> dict[str, Any]:
    """Options for loading `name`: {} if it is a path or the hub has it; local_files_only if the hub cannot be reached
    and it was downloaded before.

    kind: model or dataset. hub: loading options such as token, cache_dir and local_files_only. FileNotFoundError if
    `name` is neither a path nor on the hub. The hub is asked once, since its client would retry each file for half a
    minute.
    """
    name = os.fspath(name)
    if Path(name).exists() or hub.get("local_files_only"):
        return {}
    refuse_absent_shipped(name)
    if "://" in name:
        raise FileNotFoundError(f"{name} is an address; give a folder or a hub id, such as owner/name")
    what = "folder" if kind == "model" else "file or folder"
    absent = f"no such {what}: {name}{did_you_mean(name, kind)}"
    downloaded = _is_repository(name) and _downloaded(name, kind, hub.get("cache_dir"))
    # If the part before the last / is a local folder, it is a path: checkpoints/bas is misspelt, not a repository.
    if not downloaded and (not _is_repository(name) or ("/" in name and Path(name).parent.is_dir())):
        raise FileNotFoundError(absent)
    if constants.HF_HUB_OFFLINE:
        answer, why = UNREACHABLE, "HF_HUB_OFFLINE is set"
    else:
        answer, why = _ask(name, kind, hub.get("token"))
    if answer == THERE:
        return {}
    if downloaded:
        return {"local_files_only": True}
    if answer == ABSENT:
        raise FileNotFoundError(
            f"{absent}, and the hub has no {kind} of that name; a private one needs `hf auth login`"
        )
    raise FileNotFoundError(f"{absent}, and the hub cannot be asked for it ({why})")


def refuse_absent_shipped(name: str) -> None:
    """FileNotFoundError for a shipped model, named as in help texts, README and recipes, where none are."""
    if name.startswith("checkpoints/") and not Path("checkpoints").is_dir():
        raise FileNotFoundError(
            f"there is no {name} here: the models in checkpoints/ come with the repository, not with the wheel; start "
            "in its folder, or name a model of your own; `specheads demo` trains a head in runs/demo"
        )


def did_you_mean(name: str, kind: str = "file") -> str:
    """` (did you mean PATH?)` with the existing path nearest to `name`; "" if none is near. kind "model": the name
    alone of a shipped one counts, too."""
    near = _nearest(Path(name).expanduser())
    if near is None and kind == "model" and Path(name).name == name and _SHIPPED.is_dir():
        near = _nearest(_SHIPPED / name)
    if near in (None, Path(name), _SHIPPED):
        return ""
    return f" (did you mean {near.relative_to(Path.cwd()) if near.is_relative_to(Path.cwd()) else near}?)"


def _nearest(path: Path) -> Path | None:
    if path.exists():
        return path
    *_, parent = (Path(), *(p for p in reversed(path.parents) if p.is_dir()))
    missing, *rest = path.relative_to(parent).parts
    try:
        close = difflib.get_close_matches(missing, os.listdir(parent), n=1, cutoff=0.75)
    except OSError:  # a folder that may not be read
        return None
    return _nearest(parent.joinpath(close[0], *rest)) if close else None


def _is_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _downloaded(name: str, kind: str, cache_dir: Any = None) -> bool:
    """Is anything of this repository in the local cache?"""
    repository = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    folders = [repository / "snapshots"]
    if kind == "dataset":
        import datasets

        folders.append(Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___"))
    return any(folder.is_dir() for folder in folders)


def _ask(name: str, kind: str, token: Any = None) -> tuple[str, str]:
    """Whether the hub has `name`, or why that is unknown. The answer is cached for a minute, while its files load."""
    key = (constants.ENDPOINT, name, kind, token)
    asked, answer = _answers.get(key, (-_HOLDS, ("", "")))
    if time.monotonic() - asked < _HOLDS:
        return answer
    notice = threading.Timer(
        1.0, lambda: print(f"asking {constants.ENDPOINT} for {name} …", file=sys.stderr, flush=True)
    )
    notice.daemon = True
    notice.start()
    try:
        HfApi(token=token).repo_info(name, repo_type=kind, timeout=10)
        answer = THERE, ""
    except GatedRepoError:
        answer = THERE, ""  # loading reports whether access is granted
    except RepositoryNotFoundError:
        answer = ABSENT, ""
    except Exception as error:  # from requests, httpx or httpx2, whichever the hub's client uses
        answer = UNREACHABLE, reason(error)
    finally:
        notice.cancel()
    _answers[key] = time.monotonic(), answer
    return answer


def upload(
    folder: Path, repo_id: str, *, commit_message: str | None = None, private: bool | None = None,
    token: bool | str | None = None, revision: str | None = None, create_pr: bool = False,
) -> str:  # fmt: skip
    """Upload the files of a folder to a hub repository, which is created if needed; returns the commit's URL.

    A model card that already exists there is not replaced.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    unchanged = ["README.md"] if api.file_exists(repo_id, "README.md", revision=revision) else None
    done = api.upload_folder(
        repo_id=repo_id, folder_path=folder, commit_message=commit_message or "Upload a draft head",
        revision=revision, create_pr=create_pr, ignore_patterns=unchanged,
    )  # fmt: skip
    return str(done)


def commit_of(model: PreTrainedModel) -> str | None:
    """The hub commit that a model was loaded from; None if unknown."""
    if recorded := getattr(model.config, "_commit_hash", None):
        return recorded
    # transformers >= 5.23 does not record it. If the cache has only one commit of the repository, it is that one.
    commits = cached_commits(getattr(model, "name_or_path", None))
    return commits[0] if len(commits) == 1 else None


def record_commit(model: PreTrainedModel, **location: Any) -> None:
    """Record, in the model's config, the hub commit that it was loaded from. location: revision, cache_dir …"""
    name = getattr(model, "name_or_path", None)
    if not name or Path(name).exists() or getattr(model.config, "_commit_hash", None):
        return
    try:
        path = cached_file(name, "config.json", **location | {"local_files_only": True})
    except OSError:  # an adapter's folder has no config
        return
    model.config._commit_hash = extract_commit_hash(path, None)


def cached_commits(name: str | None) -> list[str]:
    """The cached commits of a model on the hub; [] for a path."""
    if not name or Path(name).exists():
        return []
    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return [path.parent.name for path in snapshots.glob("*/config.json")]
