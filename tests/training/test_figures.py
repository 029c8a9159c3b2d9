"""What the notebooks draw is what they were given."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from presage.report.figures import (
    COLOURS,
    house_style,
    legend_above,
    line_with_intervals,
    reliability_line,
    rows_with_intervals,
)
from presage.training.metrics import Claims


def test_rows_stand_in_order_from_the_top_each_with_its_bar() -> None:
    ax = Figure().add_subplot()
    rows_with_intervals(ax, {"a": (1.0, (0.5, 2.0)), "b": (3.0, (None, None))}, name="series")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_ylim() == (1.5, -0.5)
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.get_lines()]  # type: ignore[union-attr]
    assert drawn == [([0.5, 2.0], [0.0, 0.0]), ([1.0], [0.0]), ([3.0], [1.0])]
    assert ax.get_legend_handles_labels()[1] == ["series"]


def test_a_line_leaves_out_bars_that_are_not_known() -> None:
    ax = Figure().add_subplot()
    line_with_intervals(ax, [1, 2], [0.4, 0.5], [(0.3, 0.6), (None, None)], "ours")
    assert ax.collections[0].get_segments()[0].tolist() == [[1.0, 0.3], [1.0, 0.6]]  # type: ignore[attr-defined]
    assert len(ax.collections[0].get_segments()) == 1  # type: ignore[attr-defined]
    assert mpl.colors.to_hex(ax.get_lines()[0].get_color()).upper() == COLOURS[0]


def test_lines_differ_by_more_than_colour() -> None:
    ax = Figure().add_subplot()
    for place in range(len(COLOURS)):
        line_with_intervals(ax, [1], [1], [], str(place), place=place)
    assert len({(line.get_marker(), line.get_linestyle()) for line in ax.get_lines()}) == len(COLOURS)
    assert len({line.get_color() for line in ax.get_lines()}) == len(COLOURS)


def test_bins_of_few_claims_are_not_drawn() -> None:
    ax = Figure().add_subplot()
    said = np.repeat([0.1, 0.5], [19, 20])
    reliability_line(ax, Claims(said, said > 0.3, np.arange(39)), np.random.default_rng(0), "ours")
    assert ax.get_lines()[0].get_xdata() == pytest.approx([0.5])


def test_the_legend_is_of_the_figure() -> None:
    with mpl.rc_context():
        house_style()
        figure = Figure()
        ax = figure.add_subplot()
        line_with_intervals(ax, [1], [1], [], "ours")
        legend_above(figure, ax)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours"]
