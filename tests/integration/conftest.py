"""Tests of the adapters inside the released packages that they are for: `./run test --frameworks` has the environment.

A missing package fails; only what needs a GPU may skip, and a run of all tests compares what was skipped with a list.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped", metavar="FILE", help="the tests that must have been skipped, one a line, and no others")


class SkippedTests:
    """Fails a run whose skipped tests are not the ones that the file names."""

    def __init__(self, file: Path) -> None:
        self.expected = {line for line in file.read_text().splitlines() if line and not line.startswith("#")}
        self.seen: set[str] = set()
        self.difference: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.seen.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.difference = [f"skipped, but not listed: {name}" for name in sorted(self.seen - self.expected)]
        self.difference += [f"listed as skipped, but it ran: {name}" for name in sorted(self.expected - self.seen)]
        if self.difference and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.difference:
            terminalreporter.write_line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--skipped")
    if file:
        config.pluginmanager.register(SkippedTests(Path(file)))
