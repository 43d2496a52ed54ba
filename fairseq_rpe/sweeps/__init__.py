"""Many runs: what a sweep compares, what of it is left to do, and where that is done."""
