"""Kinds of sweeps, one module each: what the trained models are evaluated on, and how a report shows it.

:func:`fairseq_rpe.sweeps.sweep_kind.sweep_kind` loads them by name. To add a kind, add a module with a subclass of
:class:`~fairseq_rpe.sweeps.sweep_kind.SweepKind` and an instance of it, ``KIND``.
"""
