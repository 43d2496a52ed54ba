"""Reports of sweeps: tables, figures, TensorBoard files and the HTML page."""
