"""The stated mutations of the source: each still applies, and some are noticed. `make mutants` runs all."""

import ast
import subprocess
import sys

import pytest

from tests.support.mutate_source import mutated
from tests.support.paths import ROOT
from tests.support.source_mutations import MUTATIONS


@pytest.mark.slow
def test_every_mutation_changes_the_code_and_leaves_it_code():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 150
    for mutation in MUTATIONS:
        path, text = mutated(mutation)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text("utf8"))), mutation.name
        assert (ROOT / "tests" / mutation.test).is_file(), mutation.name


@pytest.mark.slow
def test_broken_code_is_noticed_and_whole_code_passes():
    names = ["ancestors of the nearest generations alone", "first token of a text supervised"]
    program = [sys.executable, ROOT / "tests/support/mutate_source.py", "--only", *names]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" killed ") == len(names)
