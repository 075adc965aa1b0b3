"""Fixtures of the decoding tests."""

import pytest

from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def base():
    """The tiny base with half its layers: these tests run it most."""
    return tiny_llama(num_hidden_layers=4)
