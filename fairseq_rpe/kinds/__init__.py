"""Kinds of sweeps, one module each: what the trained models are evaluated on, and how a report shows it.

:func:`~fairseq_rpe.sweeps.sweep_kind.sweep_kind` and :func:`~fairseq_rpe.reports.kind_report.kind_report` load them by
name. To add a kind, add a module with ``KIND``, an instance of a subclass of
:class:`~fairseq_rpe.sweeps.sweep_kind.SweepKind`, and ``REPORT``, an instance of a subclass of
:class:`~fairseq_rpe.reports.kind_report.KindReport`.
"""
