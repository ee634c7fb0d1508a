"""The pages *Results* and *Gallery*, written from the committed results.

    python -m experiments.report            # writes docs/results.md and docs/gallery.md
    python -m experiments.report --check    # ends with 1 where a page differs from what would be written

`pages.toml` has what the papers say, and the texts; `readers` read of a run what is held against a paper, `verdicts`
compares the two, and `rows` fills the tables of single runs. Typed are the papers' own figures, and what compares rows.
"""
