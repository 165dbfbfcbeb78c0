"""Runs mlx-lm's own tests, each file in processes of its own (mlx_lm_test_worker.py)."""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from typing import Any, Iterable

from mlx_lm_test_sources import CannotRun

WORKER = pathlib.Path(__file__).with_name("mlx_lm_test_worker.py")
GOOD = ("pass", "skip")
# MLX's threads end a process so now and then, when another thread has used streams; with either kind of caches.
MLX_THREADS = b"terminate called without an active exception"
LOADING = ".(loading)"  # stands for the test of a file that could not be loaded


@dataclasses.dataclass
class Outcome:
    """What became of a test: pass, skip, fail, error, crash or timeout."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.outcome in GOOD

    @property
    def last_line(self) -> str:
        lines = [line for line in self.detail.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


@dataclasses.dataclass(frozen=True)
class Task:
    """A test file, run one way."""

    way: str  # "mlx-lm" or "reprise"
    folder: pathlib.Path
    module: str
    only: str = ""
    names: tuple[str, ...] = ()
    logits: pathlib.Path | None = None  # folder


class FileRun:
    """Runs the tests of one file one way, in one process, and in another one after each that ended too early."""

    def __init__(self, task: Task, log: pathlib.Path, timeout: float, environment: dict[str, str], verbose: bool):
        self._task, self._log, self._timeout, self._environment = task, log, timeout, environment
        self._verbose = verbose
        self.outcomes: dict[str, Outcome] = {}
        self.hosts: set[tuple[str, str]] = set()  # (test, host it wanted to reach)
        self._plan: list[str] | None = None

    def run(self) -> None:
        while not self._run_process():
            pass

    def _run_process(self) -> bool:
        """Returns whether every test has an outcome now."""
        reader, writer = os.pipe()
        request = dict(folder=str(self._task.folder), module=self._task.module, install=self._task.way == "reprise",
                       only=self._task.only, names=self._task.names, done=list(self.outcomes), timeout=self._timeout,
                       logits=str(self._task.logits or ""), report=writer)
        with open(self._log, "ab") as log:
            process = subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=log, stderr=log,
                                       pass_fds=[writer], env=self._environment, cwd=self._task.folder)
        os.close(writer)
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        started = time.monotonic()
        current, plan, done = "", None, False
        for report in self._reports(process, reader):
            event = report["event"]
            if event == "installed" and not report["by"].startswith("reprise"):
                raise CannotRun("reprise.mlx_lm.install() left mlx-lm's own classes in place: "
                                f"KVCache is of {report['by']}")
            if event == "plan":
                plan = report["tests"]
                self._plan = self._plan or plan
            elif event == "start":
                current, started = report["test"], time.monotonic()
            elif event == "end":
                self._set(current, Outcome(report["outcome"], report["detail"], report["seconds"]))
                current, started = "", time.monotonic()
            elif event == "class":
                self._set_class(report, plan)
            elif event == "network":
                self.hosts.add((current or self._task.module, report["host"]))
            elif event == "done":
                done = True
        took = time.monotonic() - started
        try:
            status = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if done:
            if status != 0 and MLX_THREADS in self._log.read_bytes()[-4000:]:
                print(f"  {self._task.way:8} {self._task.module}: MLX aborted after the last test", flush=True)
            elif status != 0:  # threads that do not end, or a crash while the interpreter shuts down
                self._set(f"{self._task.module}.(end of the process)", Outcome("crash", describe(status)))
            return True
        too_early = (Outcome("timeout", f"no end after {took:.0f} s", took) if took >= self._timeout
                     else Outcome("crash", describe(status), took))
        if plan is None:
            too_early.detail += f" while the file was loaded; its last words: {last_line(self._log)}"
            self._set(self._task.module + LOADING, too_early)
            return True
        if current:
            self._set(current, too_early)
        else:  # between tests: in setUpClass or tearDownClass
            left = [test for test in plan if test not in self.outcomes]
            if not left:
                self._set(f"{self._task.module}.(end of the process)", too_early)
                return True
            for test in left:
                if class_of(test) == class_of(left[0]):
                    self._set(test, too_early)
        return all(test in self.outcomes for test in plan)

    def _reports(self, process: subprocess.Popen, reader: int) -> Iterable[dict[str, Any]]:
        """Yields what the process reports, until it ends. One that stays silent far beyond the limit is killed."""
        rest = b""
        try:
            while True:
                if not select.select([reader], [], [], self._timeout + 60)[0]:
                    process.kill()
                chunk = os.read(reader, 1 << 16)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines)
        finally:
            os.close(reader)

    def _set(self, test: str, outcome: Outcome) -> None:
        self.outcomes[test] = outcome
        if self._verbose or not outcome.good:
            print(f"  {self._task.way:8} {test:90} {outcome.outcome:7} {outcome.seconds:7.1f} s", flush=True)

    def _set_class(self, report: dict[str, Any], plan: list[str]) -> None:
        """What happens in setUpClass happens to every test of the class that has not been run."""
        name = report["text"].partition("(")[2].rstrip(")")
        tests = [test for test in plan if class_of(test) == name or test.split(".")[0] == name]
        left = [test for test in tests if test not in self.outcomes]
        for test in left or [f"{name}.({report['text'].partition(' ')[0]})"]:
            self._set(test, Outcome(report["outcome"], report["detail"]))


def class_of(test: str) -> str:
    return test.rpartition(".")[0]


def last_line(file: pathlib.Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "none"


def describe(status: int) -> str:
    return f"the process ended by signal {-status}" if status < 0 else f"the process ended with status {status}"
