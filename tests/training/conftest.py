"""Fixtures of several files here."""

import pytest

from tests.support.saved_features import dump, material


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Base, rows, and features saved of them."""
    made = material(tmp_path_factory.mktemp("material"))
    dump(made, made / "saved")
    return made
