"""One training run: what is asked, how it is started and resumed, what its folder holds."""
