"""The file that step costs are kept in, the costs that ship, and what a table says of a shape."""

import itertools
import json

import pytest

from specheads.decoding.planner.by_cost import CostKey, CostTable, Curve, StepCosts, shipped_costs
from specheads.decoding.planner.by_cost.candidates import make_candidates
from specheads.models.costs import _loaded
from tests.support.auto_costs import RANKS, costs

KEY = CostKey("base", "head", "CPU, 2 threads", "float32")


def test_a_cost_file_comes_back_and_a_wrong_or_broken_one_is_refused(tmp_path):
    path, table = tmp_path / "costs" / "a.json", CostTable(KEY, {1: costs(), 4: costs(batch=4)}, RANKS, "measured")
    table.save(path)
    assert CostTable.load(path, KEY) == table
    other = CostKey("base", "head", "CPU, 2 threads", "bfloat16")
    with pytest.raises(ValueError, match=r"a\.json holds costs for dtype 'float32', not 'bfloat16'; run `spec"):
        CostTable.load(path, other)
    content = json.loads(path.read_text())
    own = content["batches"]["1"]
    falling = {**own, "loop": [[1, 2], [2, 1]]}
    broken = {
        "no JSON": "{", "a list": "[]", "no batches": json.dumps({**content, "batches": {}}),
        "another format": json.dumps({**content, "format": 9}),
        "a falling curve": json.dumps({**content, "batches": {"1": falling}}),
        "no curve": json.dumps({**content, "batches": {"1": {"verify": {}}}}),
        "shares above 1": json.dumps({**content, "acceptance": [[0.9, 0.9]]}),
        "NaN": path.read_text().replace("4.0", "NaN"),
        "a step in no time": json.dumps({**content, "batches": {"1": {**own, "verify": {"64": [[1, 0], [64, 9]]}}}}),
        "a step of years": json.dumps({**content, "batches": {"1": {**own, "loop": [[1, 1e308]]}}}),
        "a shape of less than no time": json.dumps({**content, "batches": {"1": {**own, "shapes": [[[1], -1]]}}}),
        "a shape of NaN": json.dumps({**content, "batches": {"1": {**own, "shapes": [[[1], float("nan")]]}}}),
    }  # fmt: skip
    for text in broken.values():
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json is no file of `specheads tune` \(.*\); tune again$"):
            CostTable.load(path, KEY)


def test_costs_of_other_versions_are_used_with_one_line_that_says_so(tmp_path, caplog, monkeypatch):
    path, table = tmp_path / "a.json", CostTable(KEY, {1: costs()}, RANKS, "measured")
    table.save(path)
    assert _loaded(path, KEY, modified=1) == table and not caplog.messages
    content = json.loads(path.read_text())
    for modified, versions in ((2, {**content["versions"], "torch": "2.1.0"}), (3, None)):
        path.write_text(json.dumps({**content, "versions": versions}))
        caplog.clear()
        assert _loaded(path, KEY, modified=modified) == _loaded(path, KEY, modified=modified) == table
        (line,) = caplog.messages
        assert "\n" not in line and line.endswith("run `specheads tune` again")
        assert f"torch {'2.1.0' if versions else '?'}, specheads" in line
    assert CostTable.load(path) == table and len(caplog.messages) == 1  # of any version


def test_curves_are_shipped_for_every_device():
    for compiled, large, device in itertools.product([False, True], [False, True], ["cpu", "cuda", "mps"]):
        shipped = shipped_costs(device, compiled=compiled, large=large).for_rows(1)
        assert 1.2 * shipped.step(1, 1, 128) > shipped.step(1, 1, 64)
        assert make_candidates(shipped, 1, 5, head=True, compiled=compiled).chains
    small, large = (shipped_costs("cpu", large=large).for_rows(1) for large in (False, True))
    assert large.step(1, 8, 128) / large.step(1, 1, 128) < small.step(1, 8, 128) / small.step(1, 1, 128)


def test_a_shape_that_was_timed_as_a_whole_costs_what_it_took(tmp_path):
    """A chain of two may take longer than one of five; more unread positions add what they add to any shape."""
    own = StepCosts(1, {64: Curve(((1, 4.0),))}, Curve(((1, 0.0),)), Curve(((1, 0.0),)), Curve(((8, 1.0), (32, 1.5))),
                    Curve(((1, 0.2),)), {(1,): 3.0, (1, 1, 1, 1): 2.0})  # fmt: skip
    assert [own.draft(1, levels, 8) for levels in ((1,), (1, 1, 1, 1), (1, 1))] == pytest.approx([3.0, 2.0, 1.4])
    assert own.draft(1, (1,), 32) == pytest.approx(3.5)
    CostTable(KEY, {1: own}).save(tmp_path / "a.json")
    assert CostTable.load(tmp_path / "a.json").for_rows(1) == own
