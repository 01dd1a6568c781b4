"""A plugin of pytest: what a failed test says, as soon as it fails; pytest itself says it when all tests are done.

A run that is stopped when its minutes are over has then said why tests failed.
"""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
