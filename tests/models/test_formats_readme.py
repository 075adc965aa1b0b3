"""Claims about the README of an export: its commands work from any folder, and every figure says how it
was measured."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from specheads import SpecModel
from specheads.models.formats import FORMATS
from specheads.models.formats.export.exporting import engines_for
from tests.models.test_formats_blocks import DFLASH, DSPARK, JETSPEC
from tests.support.export_files import FORMS, USUAL, made
from tests.support.markdown import blocks
from tests.support.tiny_models import tiny_llama

WRITTEN = [
    *[(to, kind, USUAL[kind]) for to, kind in FORMS],
    *[(form.engine, "parallel", None) for form in FORMATS if form.kind == "parallel"],
]


def of_its_kind(base, to, kind, options):
    """A head that the engine takes."""
    tried = [options] if options is not None else [DFLASH, JETSPEC, DSPARK]
    heads = [made(base, kind, **each) for each in tried]
    return next(head for head in heads if to in engines_for(head.config, head.base, head.head))


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """A base in a folder whose name has a blank and a quote, loaded by its relative path."""
    folder = tmp_path_factory.mktemp("folder")
    tiny_llama().save_pretrained(folder / "the base's")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield AutoModelForCausalLM.from_pretrained("the base's"), folder


@pytest.mark.parametrize(("to", "kind", "options"), WRITTEN)
def test_paths_in_the_commands_of_a_readme_are_absolute(to, kind, options, spaced):
    base, folder = spaced
    model = of_its_kind(base, to, kind, options)
    out = Path(f"head's {to} {kind}")
    if not (folder / out).exists():
        model.export(out, to)
    text = (folder / out / "README.md").read_text()
    commands, programs = blocks(text, "bash"), blocks(text, "python")
    words = [word for command in commands for word in shlex.split(command.replace("\\\n", " "), comments=True)]
    for program in programs:
        words += [node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)]
        words += list(map(json.dumps, dicts(program)))
    paths = {value for word in words for value in values(word) if out.name in value or "the base's" in value}
    assert str(folder / out) in {path[: len(str(folder / out))] for path in paths}
    assert all(Path(path).is_absolute() for path in paths), paths
    config = json.loads((folder / out / "config.json").read_text())
    named = config.get("base_model_name_or_path") or config.get("speculators_config", {}).get("verifier", {}).get(
        "name_or_path"
    )
    assert named in (None, str(folder / "the base's"))


def dicts(program):
    return [ast.literal_eval(node) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Dict)]


def values(word):
    """A word of a command, or the strings of the JSON that it is."""
    if not isinstance(word, str):
        return []
    if not word.startswith("{"):
        return [word]
    return [value for value in json.loads(word).values() if isinstance(value, str)]


@pytest.mark.parametrize("to", ["trtllm", "modelopt"])
def test_the_options_of_tensorrt_llm_are_yaml_whatever_the_path(to, spaced):
    import yaml

    base, folder = spaced
    out = Path(f"options: of {to} #1")
    made(base, "eagle3", draft_vocab_size=40).export(out, to)
    options = yaml.safe_load((folder / out / "trtllm.yml").read_text())["speculative_config"]
    assert options["speculative_model"] == str(folder / out)


@pytest.mark.parametrize(
    ("to", "kind", "method"),
    [("vllm", "eagle", "eagle"), ("vllm", "eagle3", "eagle3"), ("vllm", "medusa", "medusa"),
     ("speculators", "eagle3", "eagle3"), ("vllm", "parallel", "dflash"), ("dflash", "parallel", "dflash")],
)  # fmt: skip
def test_the_readme_for_vllm_has_the_way_on_a_cpu_beside_that_on_a_gpu(to, kind, method, named, tmp_path):
    model = made(named, kind, **(DFLASH if kind == "parallel" else USUAL[kind]))
    text = (model.export(tmp_path / "out", to) / "README.md").read_text()
    assert "vllm serve" in blocks(text, "bash")[0]
    (program,) = blocks(text, "python")
    set_before, asked = dicts(program)
    assert set_before == {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert (asked["method"], asked["model"]) == (method, str(tmp_path / "out")) and asked["num_speculative_tokens"] > 1
    assert "enforce_eager=True" in program and "temperature=0" in program and "sampled with a draft is not" in text


def expected(text):
    """The rows of the README's table of figures, and all its text after that heading."""
    part = text.split("## What to expect")[1]
    return [line for line in part.splitlines() if line.startswith("| ")][1:], part


def test_every_figure_of_a_readme_says_greedy_or_sampled_and_how_it_was_measured(named, tmp_path):
    made(named, "eagle3", steps=4).save_pretrained(tmp_path / "head")
    run = {"prompts": 24, "new_tokens": 64, "tree": "chain:7"}
    found = {
        "eval_accepted_length": 3.66, "eval_accepted_length_sampled": 1.75, "parity_measured": 3.91,
        "parity_served": 4.25, "decoded": [
            {"temperature": 0.0, "accepted_length": 4.9, **run},
            {"temperature": 0.8, "accepted_length": 2.1, "set": "third-party code", **run},
        ],
    }  # fmt: skip
    (tmp_path / "head" / "results.json").write_text(json.dumps(found))
    rows, part = expected((SpecModel.from_pretrained(tmp_path / "head").export(tmp_path / "out", "vllm") / "README.md")
                          .read_text())  # fmt: skip
    estimate = "estimated by training on its held-out rows, a chain of 4 from every position: "
    wanted = [
        ("greedy", f"{estimate}first choices that are the base's own", "3.66"),
        ("sampled, T = 1", f"{estimate}overlap of the distributions", "1.75"),
        ("greedy", "decoded at the end of its training, held-out prompts, a chain of 4", "3.91"),
        ("greedy", "decoded at the end of its training, held-out prompts, its default tree", "4.25"),
        ("greedy", "decoded by specheads, 24 prompts of held-out files × 64 tokens, chain:7", "4.90"),
        ("sampled, T = 0.8", "decoded by specheads, 24 prompts of third-party code × 64 tokens, chain:7", "2.10"),
    ]  # fmt: skip
    assert rows == [f"| {' | '.join(row)} |" for row in wanted]
    prose = "".join(line for line in part.splitlines() if not line.startswith("|"))
    assert not any(figure in prose for *_, figure in wanted), "a bare number"


def test_the_shipped_heads_say_what_decoding_gave(tmp_path):
    from specheads.data import corpus

    for kind in ("eagle", "eagle3", "medusa"):
        model = SpecModel.from_pretrained(corpus.checkpoints_dir() / kind)
        rows, _ = expected((model.export(tmp_path / kind, "vllm") / "README.md").read_text())
        assert [row.split(" | ")[0] for row in rows] == ["| greedy", *["| greedy", "| sampled, T = 0.8"] * 2]
        assert ["decoded" in row for row in rows] == [False, *[True] * 4]
