"""Utilities for files, records, tables, progress, devices and child processes."""
