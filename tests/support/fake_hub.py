"""The hub as transformers' Trainer uploads to it."""

from concurrent.futures import Future
from pathlib import Path


def catch_uploads(patch, uploaded):
    """Uploads go to someone/e3: each calls uploaded(folder)."""

    class Hub:
        def create_repo(self, name, **options):
            return type("Repo", (), {"repo_id": "someone/e3"})

        def upload_folder(self, folder_path, **options):
            uploaded(Path(folder_path))
            (done := Future()).set_result(None)
            return done

    patch.setattr("transformers.trainer.hf_api", Hub)
