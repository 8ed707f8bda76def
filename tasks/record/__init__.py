"""Turns a compile, finished or failed, into MLflow runs that a person can browse."""

from enginesmith.tasks.record.recording import CompileRecord, Recorded, record, record_failure
from enginesmith.tasks.record.tracking import sweep

__all__ = ["CompileRecord", "Recorded", "record", "record_failure", "sweep"]
