"""`specheads report`: one page, whole HTML, that asks for nothing outside and says what the records say."""

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import pytest

from specheads.audit.verdict import AuditReport, Result, Verdict
from specheads.bench.compare.plots import tree_heat
from specheads.pictures import inline_svg
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


@pytest.fixture(scope="module")
def printed(shipped, tmp_path_factory):
    """What three commands print with --json: of generate itself, of an audit's report, and by the keys of adapt's."""
    from specheads.cli import program

    folder = tmp_path_factory.mktemp("printed")
    text = folder / "text.json"
    with pytest.MonkeyPatch.context() as patch, open(text, "w", encoding="utf8") as stdout:
        patch.setattr("sys.stdout", stdout)
        words = (
            "generate",
            str(shipped / "eagle3"),
            "--prompt",
            "<b>x</b> = ",
            "--max-new-tokens",
            "12",
            "--json",
            "--draft",
            f"model:{shipped / 'base'}",
            "--tree",
            "chain:9",
        )
        assert program.run(list(words)) == 0
    evidence = ("prompt 3: token 7 is not the argmax",)
    figures = {"largest_gap": 0.75}
    result = Result("temperature=0.0", Verdict.NOT_LOSSLESS, 64, 1234, 1e-9, 0.0, evidence=evidence, figures=figures)
    counts = {"tokens_per_step": 2.0, "steps": 8, "by_depth": [6, 2]}
    record = AuditReport("localhost:8000", 0.001, (result,)).to_dict()
    record["acceptance"] = {"server": counts, "here": {**counts, "by_depth": [4, 1]}}
    (folder / "audit.json").write_text(json.dumps(record))
    one = {"prompts": 12, "tokens": 900, "before": 2.0, "after": 2.5}
    adapted = {"before": 2.0, "after": 2.5, "domains": {"sessions": one}, "tokens": 4000, "steps": 30, "minutes": 2}
    (folder / "adapt.json").write_text(json.dumps({**adapted, "written": "heads/ours"}))
    return [text, folder / "audit.json", folder / "adapt.json"]


def test_what_commands_print_becomes_a_page(printed, tmp_path, capsys):
    assert run(capsys, "report", *printed, "--out", tmp_path / "page.html")[0] == 0
    written = (tmp_path / "page.html").read_text("utf8")
    page = Page(written)
    record = json.loads(printed[0].read_text("utf8"))
    # The text whole, each drafted token in the colour of its depth.
    block = re.search(r'<pre class="text">(.*?)</pre>', written, re.DOTALL)[1]
    assert unescape(re.sub("<[^>]+>", "", block)) == record["prompt"] + "".join(record["pieces"])
    assert "".join(record["pieces"]) == record["text"] and "<b>x</b>" not in written
    depths = [int(depth) for depth in re.findall(r'class="depth(\d)"', block)]
    assert depths == [min(depth, 7) for depth in record["draft_depths"] if depth] and len(depths) > 8
    # The audit: its verdict, its figure, its evidence, what was accepted there and here; the adapted head.
    assert "localhost:8000: not lossless" in page.texts["h3"] and {"0.75", "1,234"} <= set(page.texts["td"])
    assert "prompt 3: token 7 is not the argmax" in page.texts["li"] and {"75%", "50%"} <= set(page.texts["td"])
    assert {"2.00", "2.50", "+25.0%"} <= set(page.texts["td"])


def test_a_trees_nodes_are_drawn_once_each_below_their_parents():
    """Each share is written twice, once to hide the line behind it. A node's first child is on its line."""
    nodes = {"0": 0.5, "0.0": 0.25, "0.1": 0.125, "1": 0.2, "1.0": 0.1, "0.0.3": 0.04}
    drawn = inline_svg(lambda look: tree_heat(nodes, look))
    at = {}
    for x, y, share in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>(\d+%)<', drawn):
        at.setdefault(share, set()).add((round(float(x)), round(float(y))))
    found = {share: next(iter(points)) for share, points in at.items()}
    assert set(found) == {"100%", "50%", "25%", "12%", "20%", "10%", "4%"} and all(len(p) == 1 for p in at.values())
    y = {share: point[1] for share, point in found.items()}
    x = {share: point[0] for share, point in found.items()}
    assert y["100%"] == y["50%"] == y["25%"] == y["4%"] < y["12%"] < y["20%"] == y["10%"]
    assert x["100%"] < x["50%"] == x["20%"] < x["25%"] == x["12%"] == x["10%"] < x["4%"]


HARNESS = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe src="page.html" width="390" height="800"></iframe><script>onload = () => {
  const view = document.querySelector("iframe").contentWindow, page = view.document, wide = []
  for (const one of page.querySelectorAll("body *")) {
    if (!one.closest(".wide, pre, svg") && one.getBoundingClientRect().right > 390) wide.push(one.tagName)
  }
  const shown = [...page.querySelectorAll("svg")].map(one => one.getBoundingClientRect()).every(
    box => box.width > 200 && box.width <= 390 && box.height > 20)
  document.body.innerText = JSON.stringify({wide, shown, across: page.documentElement.scrollWidth,
    colors: [view.getComputedStyle(page.body).backgroundColor, view.getComputedStyle(page.body).color],
    drawings: page.querySelectorAll("svg").length, asked: view.performance.getEntriesByType("resource").length})
}</script>"""


def test_a_browser_shows_the_page_on_a_phone_in_light_and_dark(trained, benched, printed, tmp_path, capsys):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no browser: Debian's chromium, for one, is opened without a window")
    runs = (trained, benched, COSTS, *printed)
    assert run(capsys, "report", *runs, "--out", tmp_path / "page.html")[0] == 0
    (tmp_path / "harness.html").write_text(HARNESS)
    words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
             f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom"]  # fmt: skip
    for scheme, page_color, ink in ((1, "rgb(255, 255, 255)", "rgb(29, 35, 40)"),
                                    (0, "rgb(21, 25, 28)", "rgb(228, 232, 235)")):  # fmt: skip
        asked = [*words, f"--blink-settings=preferredColorScheme={scheme}", f"file://{tmp_path}/harness.html"]
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=True).stdout
        found = json.loads(unescape(re.search(r"\{.*\}", shown, re.DOTALL)[0]))
        assert found.pop("colors") == [page_color, ink] and found.pop("drawings") >= 3 and found.pop("across") <= 390
        assert found == {"wide": [], "shown": True, "asked": 0}


def test_what_is_no_run_is_refused_in_a_line_and_nothing_is_written(trained, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.json").write_text('{"rows": [')
    (tmp_path / "old.json").write_text('{"rows": [{"decoder": "plain"}]}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "audit.json").write_text('{"server": "", "verdict": "", "results": [{}]}')
    for name, message in {
        "empty": "expected a folder of `specheads train`", "none": "no such run", "half.json": "is no JSON",
        "old.json": "is no record of this version's", "list.json": "holds a list",
        "audit.json": "is no record of this version's",
    }.items():  # fmt: skip
        code, _, err = run(capsys, "report", trained, tmp_path / name, "--out", tmp_path / "page.html")
        assert code == 2 and message in err and err.count("\n") == 1, err
        assert not (tmp_path / "page.html").exists()
