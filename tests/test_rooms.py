"""Claims about the layout of the package: imports point one way, and every module is found under its own name."""

import importlib
import pkgutil
from importlib.util import find_spec
from types import ModuleType

from importlinter.cli import lint_imports

import specheads
from specheads.decoding.verify.grouped_attention import HAS_TRITON


def test_imports_point_down_and_in_no_circle(capsys, monkeypatch, pytestconfig):
    """Those inside functions and under TYPE_CHECKING count too."""
    monkeypatch.chdir(pytestconfig.rootpath)
    # Its logging is left out: its configuration silences every logger there is, for all later tests.
    monkeypatch.setattr("importlinter.cli.logging_config.dictConfig", lambda config: None)
    assert lint_imports(no_cache=True) == 0, capsys.readouterr().out


def packages():
    found = pkgutil.walk_packages(specheads.__path__, "specheads.")
    return ["specheads", *sorted(module.name for module in found if module.ispkg)]


def test_no_module_is_hidden_behind_another_name_of_its_package():
    """`import specheads.a.b` and `from specheads.a import b` give the same module."""
    for name in packages():
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__):
            if module.name in ("__main__", "gguf_converter"):  # programs
                continue
            if module.name == "split_attention" and not HAS_TRITON:  # Triton's kernels
                continue
            if module.name == "harness" and find_spec("lm_eval") is None:  # a class of lm-evaluation-harness's
                continue
            imported, attribute = importlib.import_module(f"{name}.{module.name}"), getattr(package, module.name)
            assert isinstance(attribute, ModuleType) and attribute is imported, f"{name}.{module.name}"


def test_every_public_name_is_there():
    for name in specheads.__all__:
        assert getattr(specheads, name) is not None and name in dir(specheads), name


def test_what_tools_of_other_toolkits_and_papers_are_called_by_stays_where_it_was():
    from specheads import compat
    from specheads.bench import cost
    from specheads.heads import HEADS

    assert all(getattr(compat, name) is not None for name in compat.__all__)
    assert cost.measured and cost.published and "eagle3" in HEADS
