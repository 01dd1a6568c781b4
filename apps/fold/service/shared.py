"""Searches that several tickets need at the same time are run once, by the first of them; the others wait for it."""

import threading
from collections.abc import Sequence
from pathlib import Path

from apps.fold.search.jobs import Search, Searches


class SharedSearches:
    """Runs jobs, `workers` at once for each caller."""

    def __init__(self, searches: Searches, workers: int):
        self.searches = searches
        self._workers = workers
        self._free = threading.Condition()
        self._claimed: set[Path] = set()

    def run(self, jobs: Sequence[Search]) -> tuple[int, dict[Search, str]]:
        """Return when all jobs have a result, but for those that failed: how many were run here, job -> why.

        Nobody waits before what it has claimed itself is done, so callers cannot wait for one another for ever.
        """
        left, run, failed = list(jobs), 0, {}
        while left:
            mine, paths = self._claim(left)
            try:
                failed |= self.searches.run(mine, self._workers) if mine else {}
            finally:
                self._let_go(paths)
            run += len(mine)
            left = [job for job in left if job not in failed and not self.searches.path(job).exists()]
            if left and not mine:
                self._wait({self.searches.path(job) for job in left})
        return run, failed

    def _claim(self, jobs: Sequence[Search]) -> tuple[list[Search], set[Path]]:
        with self._free:
            mine, paths = [], set()
            for job in jobs:
                path = self.searches.path(job)
                if path not in self._claimed and path not in paths:
                    mine.append(job)
                    paths.add(path)
            self._claimed |= paths
            return mine, paths

    def _let_go(self, paths: set[Path]) -> None:
        with self._free:
            self._claimed -= paths
            self._free.notify_all()

    def _wait(self, paths: set[Path]) -> None:
        """Until one of them is nobody's."""
        with self._free:
            self._free.wait_for(lambda: not paths <= self._claimed)
