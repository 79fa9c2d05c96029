"""Charts: what they show is drawn where it belongs, and nothing is cut off."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from paceline.report.html_page import color
from paceline.report.svg_charts import line_chart, pie


def svg(text: str) -> ElementTree.Element:
    found = ElementTree.fromstring(text).find("svg")
    assert found is not None
    return found


def test_a_pie_has_a_wedge_for_each_share_above_zero() -> None:
    drawn = svg(pie({"a": 3.0, "b": 1.0, "c": 0.0}))
    assert [title.text for title in drawn.iter("title")] == ["a: 75.0%", "b: 25.0%"]
    whole = svg(pie({"a": 0.0, "b": 2.0}))
    assert [one.tag for one in whole] == ["circle"]
    assert whole[0].attrib["fill"] == color(1)
    ElementTree.fromstring(pie({}))


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    drawn = svg(line_chart({"a": [(0, 1.0), (1, 2.0), (2, float("nan")), (3, 1.0), (4, 3.0)]}))
    assert len(list(drawn.iter("polyline"))) == 2


@pytest.mark.parametrize("most", [1.0, 30.0, 1234.0, 20_000.0, 1e6, 1.5e9])
def test_the_numbers_below_a_chart_end_inside_of_it(most: float) -> None:
    drawn = svg(line_chart({"a": [(0, 1.0), (most, 2.0)]}, "step", "loss"))
    width, height = float(drawn.attrib["width"]), float(drawn.attrib["height"])
    line = next(drawn.iter("polyline"))
    assert float(line.attrib["points"].split()[-1].split(",")[0]) <= width
    below = [text for text in drawn.iter("text") if float(text.attrib.get("y", 0)) == height - 18]
    assert len(below) >= 3
    assert float(below[-1].text or "nan") == pytest.approx(most, rel=0.3)
    ends = []
    for text in below:
        middle, half = float(text.attrib["x"]), 7.5 * len(text.text or "") / 2  # a digit is 7 wide at 12 pixels
        ends += [middle - half, middle + half]
    assert ends == sorted(ends), "two of them lie over each other"
    assert ends[0] >= 0
    assert ends[-1] <= width


@pytest.mark.parametrize("scale", [1.0, 1e-4, -1e-4, 1e9, -1e9])
def test_the_numbers_beside_a_chart_leave_room_for_what_they_are(scale: float) -> None:
    drawn = svg(line_chart({"a": [(0, scale), (5, 1.6 * scale)]}, "step", "loss"))
    beside = [text for text in drawn.iter("text") if text.attrib.get("text-anchor") == "end"]
    assert len(beside) >= 3
    (name,) = [text for text in drawn.iter("text") if text.text == "loss"]
    right_of_name = float(name.attrib["transform"].partition("(")[2].split()[0]) + 4
    assert min(float(text.attrib["x"]) - 7.5 * len(text.text or "") for text in beside) > right_of_name


def test_whole_numbers_of_an_axis_are_written_out() -> None:
    drawn = svg(line_chart({"a": [(0, 0.0), (50_000, 2.0)]}))
    assert {"0", "10000", "50000", "0.5"} <= {text.text for text in drawn.iter("text")}


def test_a_logarithmic_axis_leaves_out_what_is_not_above_zero() -> None:
    drawn = svg(line_chart({"a": [(0, 100.0), (1, 0.0), (2, 1.0), (3, 0.01)]}, log=True))
    lines = list(drawn.iter("polyline"))
    assert len(lines) == 1
    heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    (dot,) = drawn.iter("circle")
    # Equal factors are equal distances: 100 to 1 is as far as 1 to 0.01.
    assert heights[1] - heights[0] == pytest.approx(heights[0] - float(dot.attrib["cy"]), abs=0.2)


@pytest.mark.parametrize("points", [[], [(0, float("nan"))], [(5, 2.0)], [(1, 0.0), (2, 0.0)]])
def test_charts_of_little_or_nothing_can_be_drawn(points: list[tuple[float, float]]) -> None:
    ElementTree.fromstring(line_chart({"a": points}))


def test_a_long_line_is_thinned_and_keeps_its_spikes() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    drawn = line_chart({"a": points})
    assert len(drawn) < 60_000
    heights = [float(p.split(",")[1]) for p in next(svg(drawn).iter("polyline")).attrib["points"].split()]
    assert min(heights) < max(heights) - 100
