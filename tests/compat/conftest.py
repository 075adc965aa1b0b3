"""Fixtures of several files here: a target, and a small model that drafts for it."""

import pytest

from tests.reference.greedy_replay import make_draft_model, make_target


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def small():
    return make_draft_model()
