"""The pages *Results* and *Gallery*, written from the committed results.

    python -m experiments.report            # writes docs/results.md and docs/gallery.md
    python -m experiments.report --check    # ends with 1 where a page differs from what would be written

`claims` has what the papers say, and what of a run is to be held against it; `verdicts` says how the two are compared.
`tables` has the tables of single runs, and `rows` what stands in them. No figure is typed by hand here but
the papers' own.
"""
