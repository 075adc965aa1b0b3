"""Checkpoints of every format, mutated at random: each is refused with one clear line, or decodes the base's own text.

tests/support/mutate_checkpoints.py makes one of them again, by the seed and the index that a failure prints.
"""

import pytest

from specheads.models.formats import FORMATS
from tests.support.mutate_checkpoints import MAKERS, run


def broken(count, seed):
    table, lines = run(count, seed)
    assert sum(sum(found.values()) for found in table.values()) == count
    return "\n".join(lines)


def test_sixty_mutants_are_refused_or_decode(offline):
    assert not broken(60, seed=0)


@pytest.mark.slow
def test_a_thousand_mutants_are_refused_or_decode(offline):
    assert not broken(1000, seed=1)


def test_every_kind_of_head_and_every_form_that_is_read_is_mutated():
    modules = {form: type(form).__module__.rpartition(".")[2] for form in FORMATS}
    readable = {form.title if module == "speculators" else module for form, module in modules.items()}
    said = {
        "eagle3": "eagle3, vllm", "modelopt": "eagle3, modelopt",
        "speculators EAGLE-3": "eagle3, speculators", "speculators DSpark": "dspark",
        "speculators DFlash": "dflash, speculators",
        "eagle1": "eagle", "fasterdecoding": "medusa, v2", "vllm_medusa": "medusa, vllm", "hydra": "hydra++",
        "dflash": "dflash, z-lab", "deepspec": "deepspec", "shipped": "mtp",
    }  # fmt: skip
    assert readable == set(said) and set(said.values()) <= set(MAKERS)
