"""`huorn doctor`: the facts of this machine put together with what huorn can run on it."""

from huorn.doctor.report import MachineReport, inspect_machine

__all__ = ["MachineReport", "inspect_machine"]
