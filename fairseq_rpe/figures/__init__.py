"""Matplotlib figures drawn from numbers; only ``style.save`` writes files."""

# widths in inches of a column and of a page of two-column papers
WIDTHS = {"column": 3.25, "page": 6.75}
