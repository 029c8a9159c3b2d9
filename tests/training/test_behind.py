"""What a training says at its end where a baseline won."""

import math
import re

from presage.training.baselines import Behind, behind, last_words, worst


def test_a_baseline_won_where_the_whole_interval_is_on_its_side() -> None:
    (found,) = behind("markov-3", "1 step ahead", 0.07, (0.05, 0.09), 0.86)
    assert found == Behind("markov-3", "1 step ahead", 0.07, (0.05, 0.09), 0.86)
    assert behind("markov-3", "1 step ahead", 0.07, (-0.01, 0.15), 0.86) == []
    assert behind("markov-3", "1 step ahead", -0.07, (-0.09, -0.05), 0.86) == []
    assert behind("markov-3", "1 step ahead", math.nan, (math.nan, math.nan), 0.86) == []


def test_the_last_words_name_baseline_horizon_margin_and_what_to_try() -> None:
    lost = worst(
        [
            Behind("markov-3", "2 steps ahead before the output", 0.18, (0.1, 0.26), 0.7),
            Behind("markov-1", "1 step ahead before the output", 0.07, (0.05, 0.09), 0.86),
            *(Behind(f"tree-{place}", "3 steps ahead", 0.01, (0.001, 0.02), 0.5) for place in range(6)),
        ]
    )
    lines = last_words(lost, "more workflows")
    assert lines[0] == "LOST: 8 comparisons with a baseline, beyond the 95 % interval"
    assert lines[1] == "  markov-3 is better 2 steps ahead before the output by 0.18 (95 % 0.1 to 0.26)"
    assert re.fullmatch(r"  and \d+ more", lines[-2])
    assert lines[-1] == "What to try: more workflows"
    assert last_words([], "more workflows") == []
