"""One training run: its configuration, how it is started and resumed, and the files in its folder."""
