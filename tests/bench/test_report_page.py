"""`specheads report`: one page, whole HTML, that asks for nothing outside and says what the records say."""

import json
import re
from html.parser import HTMLParser

import pytest

from tests.support.command_line import run
from tests.support.paths import ROOT

COSTS = ROOT / "specheads/decoding/planner/by_cost/shipped/cpu.json"


class Page(HTMLParser):
    """The texts of a page by the tag around them; asserts that tags are closed in order and nothing is loaded."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts = [], {}
        self.feed(text)
        assert not self.open
        assert not re.search(r"url\((?!#)|@import|https?:", re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL))

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs} and tag != "script"
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What a training run leaves, of two evaluations, with a name in its recipe that is no text but a tag."""
    folder = tmp_path_factory.mktemp("runs") / "e3"
    folder.mkdir()
    history = [{"step": step, "loss": 9.0 / step, "accepted_length": 1 + step / 100} for step in range(1, 60)]
    for step, first in ((20, 0.5), (40, 0.625)):
        history.append({"step": step, "eval_accepted_length": 2.5, "eval_accuracy_depth_1": first,
                        "eval_accuracy_depth_2": 0.25, "eval_loss": float("nan")})  # fmt: skip
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (folder / "results.json").write_text(json.dumps({"eval_accepted_length": 2.75, "eval_accuracy_depth_1": 0.6875}))
    (folder / "recipe.yaml").write_text("base: <script>alert(1)</script>\n")
    return folder


@pytest.fixture(scope="module")
def benched(shipped, tmp_path_factory):
    from specheads.cli import program

    folder = tmp_path_factory.mktemp("bench")
    words = (
        "-d plain -d head --reference plain --batch 1 --temperature 0 --num-prompts 1 --max-new-tokens 12 --repeats 1"
    )
    assert program.run(["bench", str(shipped / "eagle3"), *words.split(), "--no-plots", "--out", str(folder)]) == 0
    return folder


def test_a_page_of_a_run_a_bench_and_costs(trained, benched, tmp_path, capsys):
    words = (
        "report",
        trained,
        benched,
        COSTS,
        "--out",
        tmp_path / "page.html",
        "--pictures",
        tmp_path / "talk",
        "--json",
    )
    code, out, err = run(capsys, *words)
    assert code == 0 and json.loads(out)["page"] == str(tmp_path / "page.html"), err
    # Each picture of the page is a file, too, as PNG and as SVG, light and dark.
    drawn = {"e3-curves", f"{benched.name}-bench", "cpu.json-batch_1"}
    files = {file.name for file in (tmp_path / "talk").iterdir()}
    assert {f"{stem}{form}" for stem in drawn for form in (".png", "-dark.png", ".svg")} <= files
    assert json.loads(out)["pictures"] and {*json.loads(out)["pictures"]} == {str(tmp_path / "talk" / f) for f in files}
    page = Page((tmp_path / "page.html").read_text("utf8"))
    titles, cells, code_blocks = page.texts["h3"], page.texts["td"], "".join(page.texts["pre"])
    # The run: its curves, accuracy by depth at each evaluation and at the end, its recipe as text.
    assert "at the end" in titles and {"loss", "accepted length", "accuracy by depth"} <= set(page.texts["text"])
    assert {"50%", "62%", "69%", "2.75"} <= set(cells) and {"step 20", "step 40"} <= set(page.texts["th"])
    assert "base: <script>alert(1)</script>" in code_blocks and "specheads train" in code_blocks
    # The bench: a bar for each decoder with its speed, the tables of bench.md, the command.
    record = json.loads((benched / "bench.json").read_text("utf8"))
    for row in record["rows"]:
        assert f"{row['speed_up']:.2f}×" in page.texts["text"] and f"{row['tokens_per_second']:.1f}" in cells
    assert record["command"] in code_blocks and any("speed over plain" in text for text in page.texts["text"])
    assert any(record["environment"]["cpu"] in text for text in page.texts["p"])
    # The costs: each measured point.
    measured = json.loads(COSTS.read_text())["batches"]["1"]["verify"]["128"]
    assert all(f"{ms:.2f}" in cells for _, ms in measured)


def test_what_is_no_run_is_refused_in_a_line_and_nothing_is_written(trained, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.json").write_text('{"rows": [')
    (tmp_path / "old.json").write_text('{"rows": [{"decoder": "plain"}]}')
    (tmp_path / "list.json").write_text("[]")
    for name, message in {
        "empty": "expected a folder of `specheads train`", "none": "no such run", "half.json": "is no JSON",
        "old.json": "is no record of this version's", "list.json": "holds a list",
    }.items():  # fmt: skip
        code, _, err = run(capsys, "report", trained, tmp_path / name, "--out", tmp_path / "page.html")
        assert code == 2 and message in err and err.count("\n") == 1, err
        assert not (tmp_path / "page.html").exists()
