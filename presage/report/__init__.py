"""The report of a training, a study or a description: one page, and the same in Markdown.

`next_agent.py`, `lengths.py`, `router.py`, `replay.py`, `study.py` and `traces.py` read `metrics.json` and make a
`Document` of `blocks.py`; `plot.py` draws; `files.py` writes page and Markdown. Nothing here computes a figure: the
report has only what the metrics have.
"""
