"""Draws matplotlib figures from numbers; nothing is read or written here."""
