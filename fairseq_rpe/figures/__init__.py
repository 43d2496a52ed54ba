"""Draws matplotlib figures from numbers; nothing is read or written here."""

# inches: of a column and of a page as papers in two columns have them
WIDTHS = {"column": 3.25, "page": 6.75}
