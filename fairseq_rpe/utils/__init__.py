"""Files, records, tables, progress, devices and child processes, for all other packages."""
