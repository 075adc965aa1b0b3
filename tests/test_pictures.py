"""Pictures: read on light and dark pages, names beside their own data and over none, SVG that is whole."""

import itertools
import random
import re
from functools import partial
from xml.etree import ElementTree

import pytest

from specheads import pictures
from specheads.pictures import DARK, LIGHT, label_ends, label_front, spread

pytest.importorskip("matplotlib")
HISTORY = [
    *({"step": step, "loss": 9.0 / step, "accepted_length": 1 + step / 100, "accuracy_depth_1": step / 100}
      for step in range(1, 60)),
    *({"step": step, "eval_loss": 3.0, "eval_accuracy_depth_1": 0.5, "eval_accepted_length": 2.5,
       "eval_accepted_length_error": 0.1} for step in (30, 72)),
]  # fmt: skip


def lines_of(look):
    return pictures.line_chart({"a": [(0, 1), (5, 2)], "b": [(0, 3), (5, 1)]}, "step", "tokens a step", look)


def luminance(color):
    """Relative luminance of the sRGB colour #rrggbb, as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_is_seen_on_its_page_and_shades_are_in_order():
    for look in (LIGHT, DARK):
        assert contrast(look.ink, look.page) > 7 and contrast(look.soft, look.page) > 4.5
        assert min(contrast(color, look.page) for color in (*look.colors, *look.shades)) > 3  # WCAG's, of graphics
        levels = [luminance(shade) for shade in look.shades]
        assert levels in (sorted(levels), sorted(levels, reverse=True))
        assert [look.shade(i, 8) for i in range(8)] == list(look.shades) and look.shade(0, 1) == look.shades[0]
        assert len(set(look.every())) == len(look.every()), "an SVG tells by the colour what it is the colour of"


def test_names_that_have_room_stay_and_others_part_around_their_mean():
    assert spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    assert spread([0.1, 0.5, 0.5], 0.1) == pytest.approx([0.1, 0.45, 0.55])
    assert spread([0.4, 0.5, 0.5, 0.5], 0.1) == pytest.approx([0.325, 0.425, 0.525, 0.625])


def test_they_stay_beside_the_panel_where_there_is_room():
    assert spread([0.0, 0.0, 1.0, 1.0], 0.1) == pytest.approx([0.0, 0.1, 0.9, 1.0])
    assert spread([1.0] * 12, 0.1)[0] == 0.0


def shown_texts(figure, panel):
    """The rectangles of a panel's texts, without the lines that join them to their data."""
    import matplotlib.text
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    return [matplotlib.text.Text.get_window_extent(text) for text in panel.texts]


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_no_name_of_a_line_covers_a_name_or_the_panel_nor_does_its_thread(scale):
    figure, ((panel,),) = pictures.panels(1, 1, 6, 4)
    panel.set_xscale(scale)
    for i in range(8):
        panel.plot([1, 2, 3 if i else 2.5], [i, 3 + i / 10, 4 + i / 100], label=f"line {i}")
    label_ends(panel, panel.get_lines())
    shown = shown_texts(figure, panel)
    assert [text.get_text() for text in panel.texts] == [
        f"line {i}" for i in range(8)
    ]  # by their ends, the lowest first
    right = panel.get_window_extent().x1
    assert all(box.x0 >= right and box.x1 <= figure.bbox.x1 for box in shown)
    assert all(text.arrow_patch.get_window_extent().x0 >= right for text in panel.texts)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(shown, 2))
    assert {t.get_text(): t.get_color() for t in panel.texts} == {
        line.get_label(): line.get_color() for line in panel.get_lines()
    }


@pytest.mark.parametrize("left", [True, False])
def test_no_name_of_a_point_covers_a_name_or_a_point(left):
    rng = random.Random(0)
    for _ in range(3):
        figure, ((panel,),) = pictures.panels(1, 1, 6.4, 4.6)
        xs, ys = sorted(rng.random() for _ in range(9)), sorted(1 + rng.random() for _ in range(9))
        if not left:
            xs.reverse()
        points = [(x, y, f"rule:{i}:{x:.2f}", "C0") for i, (x, y) in enumerate(zip(xs, ys, strict=True))]
        panel.plot(xs, ys, "o")
        label_front(panel, points, left=left)
        shown = shown_texts(figure, panel)
        assert {text.get_text() for text in panel.texts} == {text for _, _, text, _ in points}
        assert not any(one.overlaps(other) for one, other in itertools.combinations(shown, 2))
        at = panel.transData.transform(list(zip(xs, ys, strict=True)))
        assert not any(box.contains(x, y) for box in shown for x, y in at)
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in shown)


def test_an_svg_asks_for_nothing_and_each_of_its_colours_has_a_dark_one():
    text = pictures.svg(lines_of)
    assert text == pictures.svg(lines_of), "the same picture is the same file"
    root = ElementTree.fromstring(text)
    links = [value for node in root.iter() for name, value in node.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links) and not re.search(
        r"url\((?!#)|@import|@font-face|<metadata", text
    )
    words = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    assert {"a", "b", "step", "tokens a step"} <= set(words), "text is text"
    used = {
        (kind, color) for kind, color in re.findall(r"(fill|stroke): (#[0-9a-f]{6})", text.partition("</style>")[2])
    }
    dark = dict(zip(LIGHT.every(), DARK.every(), strict=True))
    assert used and all(f'"{kind}: {color}"]{{{kind}:{dark[color]}!important}}' in text for kind, color in used)
    inline = pictures.inline_svg(lines_of)
    assert inline.startswith("<svg viewBox=") and "http" not in inline
    assert all(
        f'id="{link[1:]}"' in inline for link in re.findall(r'href="(#[^"]+)"|url\((#[^)]+)\)', inline)[0] if link
    )


def test_a_picture_is_written_in_all_forms_or_refused(tmp_path):
    files = pictures.save_all(tmp_path / "new", {"a": lines_of})
    assert [file.name for file in files] == ["a.png", "a-dark.png", "a.svg"]
    light, dark, _ = (file.read_bytes() for file in files)
    assert light.startswith(b"\x89PNG") and dark.startswith(b"\x89PNG") and light != dark
    with pytest.raises(ValueError, match=r"a\.jpg: pictures are \.png or \.svg"):
        pictures.save(tmp_path / "a.jpg", lines_of)


def test_curves_end_where_they_were_measured_over_the_same_steps():
    from specheads.training.report import curves

    whole = partial(curves.figure, HISTORY)(LIGHT)
    assert len({panel.get_xlim() for panel in whole.axes}) == 1
    for panel, name in zip(whole.axes, ("loss", "accepted length", "accuracy_depth_1"), strict=True):
        training, held_out = panel.get_lines()[:2]
        assert list(training.get_xdata()) == list(range(1, 60)) and training.get_marker() == "None"
        assert list(held_out.get_xdata()) == [30, 72] and held_out.get_marker() == "o", name
    assert [text.get_text() for text in whole.axes[2].texts][1:] == ["depth 1"], "a depth has one name"
    (interval,) = (c for c in whole.axes[1].collections if len(c.get_segments()) == 2)
    assert interval.get_segments()[0][:, 1].tolist() == pytest.approx([2.5 - 0.196, 2.5 + 0.196], abs=1e-4)
