"""What was found by sweeps: tables, figures, TensorBoard and the page."""
