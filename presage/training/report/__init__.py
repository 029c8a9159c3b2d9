"""What a training, a study or a description leaves behind for people: one page, and the same in Markdown.

From the numbers to the page in three steps, each blind to the others: `next_agent.py`, `study.py` and `description.py`
read `metrics.json` and say what is told (a `Document` of `blocks.py`); `plot.py` and `call_graph.py` draw; `page.py`
and `markdown.py` write it down. No step computes a figure: a number that is not in the metrics is not in the report.
"""
