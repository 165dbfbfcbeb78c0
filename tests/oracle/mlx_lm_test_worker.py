#!/usr/bin/env python3
"""Runs tests of one unittest file and reports each as it goes. Started by run_mlx_lm_tests.py, not by hand.

One JSON object arrives on standard input (the fields of `Request`); reports, one JSON object a line, go to file
descriptor `report`. What the tests print goes to standard output and error. A test that runs longer than `timeout`
ends the process, as a crash does: the caller knows by the last `start` which test it was.

Tests do not depend on each other: before each, every random generator is seeded, and after each, what it has set on
its class's model is taken back (a test of test_generate that fails leaves its own `make_cache` there). Only this
machine can be reached: a connection to another host fails, and is reported.
"""
from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import ipaddress
import json
import os
import random
import sys
import time
import traceback
import unittest
from typing import Any, Iterator

LOOPBACK_NAMES = {"", "localhost", "localhost.localdomain", "ip6-localhost"}


@dataclasses.dataclass
class Request:
    folder: str  # holds the test file
    module: str  # its name without .py
    install: bool  # on Reprise's caches
    only: str  # part of the ids to run; empty for all
    names: list[str]  # names of the test functions to run; empty for all
    done: list[str]  # ids that are not to be run
    timeout: float  # seconds a test, and the loading of the file, may take
    report: int  # file descriptor
    logits: str = ""  # folder for the logits of the models of test_models; empty: none are made


class Reporter:
    """Writes the reports. A line is one write, so that a crash leaves whole lines."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def __call__(self, event: str, **fields: Any) -> None:
        os.write(self._descriptor, (json.dumps({"event": event, **fields}) + "\n").encode())


def is_this_machine(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host is None or host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def close_network(report: Reporter) -> None:
    """Makes every look-up of and connection to another host fail, and reports it."""

    def watch(event: str, arguments: tuple) -> None:
        if event == "socket.getaddrinfo":
            host = arguments[0]
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        else:
            return
        if not is_this_machine(host):
            report("network", host=str(host))
            raise ConnectionError(f"{host} is not this machine, and these tests may not use the network")

    sys.addaudithook(watch)


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        else:
            yield item


class Result(unittest.TestResult):
    """Reports outcomes; of several in one test (subtests, tearDown) the worst counts."""

    RANK = {"pass": 0, "skip": 1, "fail": 2, "error": 3}

    def __init__(self, report: Reporter, timeout: float):
        super().__init__()
        self._report = report
        self._timeout = timeout
        self._outcome, self._detail, self._started = "pass", "", 0.0
        self.current = ""  # id of the test that is running
        self._attributes: dict[str, Any] = {}  # of the test class's model, before the test

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        seed_all()
        self._attributes = dict(model_attributes(test))
        self._outcome, self._detail, self._started = "pass", "", time.monotonic()
        self.current = test.id()
        self._report("start", test=test.id())
        print(f"---- {test.id()}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(self._timeout, exit=True)

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        attributes = model_attributes(test)
        attributes.clear()
        attributes.update(self._attributes)
        faulthandler.dump_traceback_later(self._timeout, exit=True)  # for setUpClass of the next class
        self._report("end", test=test.id(), outcome=self._outcome, detail=self._detail,
                     seconds=time.monotonic() - self._started)

    def _note(self, test: Any, outcome: str, detail: str) -> None:
        if not isinstance(test, unittest.TestCase):  # setUpClass and the like: its text has the class's name
            self._report("class", text=str(test), outcome=outcome, detail=detail)
        elif self.RANK[outcome] > self.RANK[self._outcome]:
            self._outcome, self._detail = outcome, detail

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skip", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, "fail", self._text(err))

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, "error", self._text(err))

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(test, "fail" if issubclass(err[0], test.failureException) else "error",
                       f"{subtest._subDescription()} {self._text(err)}")

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        pass

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._note(test, "fail", "unexpected success")

    @staticmethod
    def _text(err: Any) -> str:
        text = "".join(traceback.format_exception(*err))
        print(text, file=sys.stderr, flush=True)
        return text


def model_attributes(test: unittest.TestCase) -> dict[str, Any]:
    """The attributes, weights apart, that were set on the model which the tests of a class share."""
    return vars(test.model) if hasattr(test, "model") else {}


def seed_all() -> None:
    import mlx.core as mx
    import numpy as np

    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)


def install_reprise(report: Reporter) -> None:
    import reprise.mlx_lm

    reprise.mlx_lm.install()
    from mlx_lm.models import cache

    report("installed", by=cache.KVCache.__module__)


def main() -> int:
    request = Request(**json.load(sys.stdin))
    report = Reporter(request.report)
    faulthandler.enable()
    faulthandler.dump_traceback_later(request.timeout, exit=True)
    close_network(report)
    sys.path.insert(0, request.folder)
    if request.install:
        install_reprise(report)
    module = importlib.import_module(request.module)
    tests = [test for test in flat(unittest.defaultTestLoader.loadTestsFromModule(module))
             if request.only in test.id() and test.id() not in request.done
             and (not request.names or test.id().rpartition(".")[2] in request.names)]
    report("plan", tests=[test.id() for test in tests])
    result = Result(report, request.timeout)
    if request.logits and hasattr(module, "TestModels"):
        import mlx_lm_model_logits

        module.TestModels.model_test_runner = mlx_lm_model_logits.record(
            module.TestModels.model_test_runner, request.logits, lambda: result.current)
    unittest.TestSuite(tests).run(result)
    faulthandler.cancel_dump_traceback_later()
    report("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
