"""The form of a prompt: how long it is and what it is written in, without a word of it.

Difficulty shows in form: long questions, numbers, formulas and code are solved less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from presage.features.prompt_terms import codes_of, read_part

NAMES: Final = (
    "log characters",
    "log words",
    "log lines",
    "log numbers",
    "log digits of the longest number",
    "log question marks",
    "log signs of formulas",
    "log full stops",
    "log commas",
    "log percent signs",
    "share of digits",
    "share beyond ASCII",
    "share of capitals",
    "share of signs",
    "characters a word",
)
SIZE: Final = len(NAMES)

_LONGEST_WORD: Final = 20.0


def form(prompts: Sequence[str]) -> NDArray[np.float32]:
    """The form of n prompts, float32 [n, 15], as `NAMES`; characters are counted in all of a long prompt's length."""
    rows = np.zeros((len(prompts), SIZE), np.float32)
    for i, prompt in enumerate(prompts):
        _form(codes_of(read_part(prompt)), len(prompt), rows[i])
    return rows


@njit(cache=True)
def _form(codes: NDArray[np.uint32], length: int, out: NDArray[np.float32]) -> None:
    words = lines = numbers = longest = run = questions = formulas = stops = commas = percents = 0
    digits = beyond = capitals = signs = 0
    inside = False
    for code in codes:
        space = code <= 32 or code == 0xA0 or code == 0x3000
        if not space and not inside:
            words += 1
        inside = not space
        if 48 <= code <= 57:
            digits += 1
            run += 1
            if run == 1:
                numbers += 1
            longest = max(longest, run)
        else:
            run = 0
        lines += code == 10
        questions += code == 63 or code == 0xFF1F
        formulas += code == 36 or code == 92 or code == 94 or code == 61
        stops += code == 46 or code == 0x3002
        commas += code == 44 or code == 0xFF0C
        percents += code == 37
        beyond += code > 127
        capitals += 65 <= code <= 90
        signs += 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    size = max(len(codes), 1)
    counts = (length, words, lines, numbers, longest, questions, formulas, stops, commas, percents)
    for i in range(len(counts)):
        out[i] = np.log(1.0 + counts[i])
    shares = (digits, beyond, capitals, signs)
    for i in range(len(shares)):
        out[len(counts) + i] = shares[i] / size
    out[len(counts) + len(shares)] = min(size / max(words, 1), _LONGEST_WORD)
