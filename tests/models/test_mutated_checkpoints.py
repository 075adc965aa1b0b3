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


def test_thirty_mutants_are_refused_or_decode(offline):
    assert not broken(30, seed=0)


@pytest.mark.slow
def test_a_thousand_mutants_are_refused_or_decode(offline):
    assert not broken(1000, seed=1)


def test_every_kind_of_head_and_every_form_that_is_read_is_mutated():
    readable = {type(form).__name__ for form in FORMATS}
    mutated = {
        "Eagle3": "eagle3, vllm", "ModelOpt": "eagle3, modelopt", "SpeculatorsEagle3": "eagle3, speculators",
        "SpeculatorsBlocks": "dspark", "SpeculatorsDFlash": "dflash, speculators", "Eagle": "eagle",
        "Medusa": "medusa, v2", "VllmMedusa": "medusa, vllm", "Hydra": "hydra++", "DFlash": "dflash, z-lab",
        "DeepSpec": "deepspec", "Shipped": "mtp", "DFlash2": "dflash2", "SpeculatorsDFlash2": "dflash2, speculators",
        "Domino": "domino", "SpeculatorsPEagle": "p-eagle", "SpeculatorsMtp": "mtp, speculators",
    }  # fmt: skip
    assert readable == set(mutated) and set(mutated.values()) <= set(MAKERS)
