"""Names at the ends of lines: each beside its own, none over another, none over data."""

import itertools

import pytest

from specheads.training.report.curves import label_ends, spread


def test_names_that_have_room_stay_and_others_part_around_their_mean():
    assert spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    assert spread([0.1, 0.5, 0.5], 0.1) == pytest.approx([0.1, 0.45, 0.55])
    assert spread([0.4, 0.5, 0.5, 0.5], 0.1) == pytest.approx([0.325, 0.425, 0.525, 0.625])


def test_they_stay_beside_the_panel_where_there_is_room():
    assert spread([0.0, 0.0, 1.0, 1.0], 0.1) == pytest.approx([0.0, 0.1, 0.9, 1.0])
    assert spread([1.0] * 12, 0.1)[0] == 0.0


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_no_name_covers_a_name_or_the_panel(scale):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    canvas, panel = FigureCanvasAgg(figure), figure.subplots()
    panel.set_xscale(scale)
    for i in range(8):
        panel.plot([1, 2, 3], [i, 3 + i / 10, 4 + i / 100], label=f"line {i}")
    label_ends(panel, panel.get_lines())
    canvas.draw()
    boxes = {text.get_text(): text.get_bbox_patch() or text for text in panel.texts}
    assert list(boxes) == [f"line {i}" for i in range(8)]  # in the order of their ends, from the lowest
    import matplotlib.text

    shown = [matplotlib.text.Text.get_window_extent(text) for text in panel.texts]
    assert all(box.x0 >= panel.get_window_extent().x1 and box.x1 <= figure.bbox.x1 for box in shown)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(shown, 2))
    assert {t.get_text(): t.get_color() for t in panel.texts} == {
        line.get_label(): line.get_color() for line in panel.get_lines()
    }
