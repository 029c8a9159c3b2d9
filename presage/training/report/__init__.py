"""What a training, a study or a description leaves behind for people: one page, and the same in Markdown.

From the numbers to the page in three steps, each blind to the others: `next_agent.py`, `lengths.py`, `router.py`,
`replay.py`, `study.py` and `traces.py` read `metrics.json` and make a `Document` of `blocks.py`; `plot.py` draws;
`files.py` writes page and Markdown. No step computes a figure: what is not in the metrics is not in the report.
"""
