#!/usr/bin/env python3
"""Runs mlx-lm's own tests on its caches and on Reprise's (`reprise.mlx_lm.install()`), and compares test by test.

    PYTHONPATH=build/<preset>/python python tests/oracle/run_mlx_lm_tests.py --model FOLDER [--ci]

The tests come from mlx-lm's source distribution, which is downloaded once and checked by its hash. Copies of them
load the model of --model in place of the one on the hub; nothing that is installed is touched. They run in processes
of their own, so that a crash or a hang costs one test. Every difference is printed. One is allowed only if EXPECTED
has it: there mlx-lm or its test is wrong by the requirements, and where the test has to be mended, the mended test
has to pass both ways. test_models looks at shapes only, so the logits of its models over caches are made and compared
besides (mlx_lm_model_logits.py).

The last line is `N passed, M failed` for Reprise. The exit status is 0 if nothing differs but what EXPECTED has, 1 if
something does, 2 if the tests could not be run.
"""
from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import pathlib
import shutil
import sys
import tempfile
import time
from typing import Iterable

from mlx_lm_test_process import LOADING, FileRun, Outcome, Task
from mlx_lm_test_sources import (CACHE, ROOT, VERSION, CannotRun, check_model, check_modules, make_hub_cache,
                                 test_environment, test_sources, write_tests)

MODEL = ROOT / ".cache" / "models" / "smollm2-mlx"

FILES = ("test_prompt_cache", "test_generate", "test_models", "test_server")
# The tests of test_models that are about caches, masks and attention over caches; --ci runs these.
CACHE_TESTS = (
    "test_kv_cache", "test_rotating_kv_cache", "test_rotating_kv_cache_chat_mode", "test_causal_mask_padding",
    "test_mask_with_window", "test_llama_model_sliding_attention", "test_quantized_sdpa",
    "test_quantized_sdpa_gqa_batched_mask", "test_plamo3_attention_cache_rope_policy",
    "test_step3p5_make_cache_uses_rotating_for_sliding_layers",
    "test_step3p5_make_cache_uses_fallback_sliding_pattern", "test_falcon_h1_without_cache",
    "test_gemma3n_kv_shared_layers_ignore_chunking", "test_granitemoehybrid_padded_batch", "test_minimax_m3_vl",
    "test_llama4_chunked_kv_cache", "test_ssm_right_pad", "test_spark2_5", "test_spark2_5_chunked_vs_oneshot_prefill",
)
NAMES = {"mlx-lm": "on mlx-lm's caches", "reprise": "on Reprise's caches"}


@dataclasses.dataclass(frozen=True)
class Expected:
    """A difference that the requirements ask for."""

    test: str
    before: str  # outcome on mlx-lm's caches
    ours: str  # outcome on Reprise's
    requirement: str
    reason: str
    corrections: tuple[tuple[str, str], ...] = ()  # text of the test file (there exactly once) → what it has to be
    corrected_before: str = "pass"  # outcome of the corrected test on mlx-lm's caches; on ours it has to pass


EXPECTED = (
    Expected(
        "test_prompt_cache.TestPromptCache.test_batch_rotating_kv_cache", "pass", "fail", "M7",
        "For a chunk after the ring has wrapped, mlx-lm's mask hides the oldest row that is there and in the window.",
        (("""                [False, False, False, True, True, True, True, True, False],
                [False, False, False, True, True, True, True, True, True],
""", """                [False, False, True, True, True, True, True, True, False],
                [False, False, True, True, True, True, True, True, True],
"""),), "fail"),
    Expected(
        "test_prompt_cache.TestPromptCache.test_save_load_batch_caches", "pass", "error", "Z5",
        "The test puts four rows into batch caches that were made for two.",
        (("ArraysCache(size=2, left_padding=[1, 2])", "ArraysCache(size=2, left_padding=[1, 2, 0, 3])"),
         ("BatchKVCache(left_padding=[1, 2])", "BatchKVCache(left_padding=[1, 2, 0, 3])"),
         ("BatchRotatingKVCache(max_size=10, left_padding=[1, 2])",
          "BatchRotatingKVCache(max_size=10, left_padding=[1, 2, 0, 3])"),
         ("left_padding = mx.array([1, 2])", "left_padding = mx.array([1, 2, 0, 3])"))),
    Expected(
        "test_generate.TestGenerate.test_batch_max_kv_size_creates_rotating_cache", "fail", "pass", "F1",
        "mlx-lm ignores max_kv_size for models that make their own caches, Llama's among them."),
)

# What mlx-lm itself fails with the small model and without a GPU, and why. Nothing else depends on this table than what
# is printed, and --without-baseline, which takes these for failures of mlx-lm without having seen them.
OWN_FAILURES = {
    "test_generate.TestGenerate.test_batch_sliding_window":
        "this model's rows differ by 1e-4 in a batch of two: rounding, the same to the bit on both kinds of caches",
    "test_generate.TestGenerate.test_generate_with_logit_bias": "wants the text of the hub model's token 0",
    "test_generate.TestGenerate.test_stream_generate_input_embeddings": "wants the hub model's answer",
    "test_generate.TestGenerate.test_stream_generate_input_embeddings_prefill": "wants the hub model's answer",
    "test_models.TestModels.test_bitnet": "runs a Metal kernel",
    "test_models.TestModels.test_gated_delta": "runs a Metal kernel",
    "test_models.TestModels.test_gated_delta_masked": "runs a Metal kernel",
}

# Logits may differ by this part of the largest one: attention of ours adds up in another order.
LOGITS_TOLERANCE = 1e-4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=MODEL, metavar="FOLDER",
                        help=f"an MLX model folder (a small llama-like chat model); default {MODEL.relative_to(ROOT)}")
    parser.add_argument("--distribution", type=pathlib.Path, metavar="FOLDER",
                        help=f"mlx-lm {VERSION}'s unpacked source distribution; default: download it into "
                        f"{CACHE.relative_to(ROOT)} and keep it there")
    parser.add_argument("--files", default="", metavar="NAMES",
                        help=f"test files, by commas; default {','.join(FILES)}")
    parser.add_argument("--only", default="", metavar="PATTERN",
                        help="only tests whose id (file.class.test) has this text in it")
    parser.add_argument("--ci", action="store_true", help="test_prompt_cache and the cache parts of test_models")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time; default 1")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for each test; default 900")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--without-baseline", action="store_true",
                      help="only on Reprise's caches: every failure that EXPECTED does not have counts as a difference")
    ways.add_argument("--baseline-only", action="store_true", help="only on mlx-lm's caches")
    parser.add_argument("--without-logits", action="store_true",
                        help="leave out comparing the logits of test_models's models; --ci does so too")
    parser.add_argument("--logs", type=pathlib.Path, metavar="FOLDER",
                        help="keep what the tests print here; default: a temporary folder, kept if something differs")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every test, and the whole tracebacks")
    arguments = parser.parse_args()
    if arguments.ci and arguments.files:
        parser.error("--ci chooses the files itself: leave --files out")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, but got {arguments.jobs}")
    if arguments.timeout <= 0:
        parser.error(f"--timeout must be more than 0, but got {arguments.timeout}")
    return arguments


def corrected(sources: dict[str, str], expected: Iterable[Expected]) -> dict[str, str]:
    """The test files with every correction made."""
    result = dict(sources)
    for entry in expected:
        module = entry.test.split(".")[0]
        for old, new in entry.corrections:
            if (count := result[module].count(old)) != 1:
                raise CannotRun(f"the correction of {entry.test} must apply exactly once, "
                                f"but its text occurs {count} times")
            result[module] = result[module].replace(old, new)
    return result


def run_tasks(tasks: list[Task], logs: pathlib.Path, arguments: argparse.Namespace,
              environment: dict[str, str]) -> dict[Task, FileRun]:
    runs = {task: FileRun(task, logs / f"{task.way}-{task.folder.name}-{task.module}.log", arguments.timeout,
                          environment, arguments.verbose) for task in tasks}

    def run(task: Task) -> None:
        started = time.monotonic()
        runs[task].run()
        print(f"{task.module} ({task.folder.name}) {NAMES[task.way]}: {tally(runs[task].outcomes.values())} "
              f"in {time.monotonic() - started:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for future in [pool.submit(run, task) for task in tasks]:
            future.result()
    return runs


def tally(outcomes: Iterable[Outcome]) -> str:
    kinds = [outcome.outcome for outcome in outcomes]
    passed, skipped = kinds.count("pass"), kinds.count("skip")
    return f"{passed} passed, {len(kinds) - passed - skipped} failed, {skipped} skipped"


def indented(text: str, lines: int | None) -> str:
    kept = text.strip().splitlines()
    return "\n".join("      " + line for line in (kept if lines is None else kept[-lines:]))


class Comparison:
    """The two runs side by side. Without one of mlx-lm, it is taken to pass what EXPECTED does not say it fails."""

    def __init__(self, runs: dict[Task, FileRun], corrected_folder: str, verbose: bool):
        self._lines = None if verbose else 6
        self.outcomes: dict[tuple[str, bool], dict[str, Outcome]] = {}  # (way, corrected) → by test
        self.hosts: set[tuple[str, str]] = set()
        for task, run in runs.items():
            self.outcomes.setdefault((task.way, task.folder.name == corrected_folder), {}).update(run.outcomes)
            self.hosts |= run.hosts
        self.ours = self.outcomes.get(("reprise", False), {})
        self.baseline = self.outcomes.get(("mlx-lm", False))

    def print_differences(self) -> int:
        """Returns how many there are that should not be."""
        unexpected = 0
        table = {entry.test: entry for entry in EXPECTED}
        unloaded = {test.split(".")[0] for test in [*self.ours, *(self.baseline or {})] if test.endswith(LOADING)}
        for test in sorted(set(self.ours) | set(self.baseline or {})):
            if test.split(".")[0] in unloaded and not test.endswith(LOADING):
                continue
            ours, entry = self.ours.get(test), table.get(test)
            before = self._before(test, entry)
            if entry is not None:
                unexpected += self._print_expected(entry, before, ours)
            elif (before.outcome if before else "") != (ours.outcome if ours else ""):
                unexpected += 1
                print(f"  UNEXPECTED {test}: {said(before)} → {said(ours)}")
                worse = ours if ours is not None and not ours.good else before
                if worse is not None and worse.detail:
                    print(indented(worse.detail, self._lines))
            elif ours.outcome == "skip" and before.detail != ours.detail and self.baseline is not None:
                unexpected += 1
                print(f"  UNEXPECTED {test}: skipped for another reason: {before.detail} → {ours.detail}")
        return unexpected

    def _before(self, test: str, entry: Expected | None) -> Outcome | None:
        if self.baseline is not None:
            return self.baseline.get(test)
        ours = self.ours[test].outcome
        if entry is not None:
            return Outcome(entry.before)
        return Outcome(ours if ours == "skip" or (ours in ("fail", "error") and test in OWN_FAILURES) else "pass")

    def _print_expected(self, entry: Expected, before: Outcome | None, ours: Outcome | None) -> int:
        unexpected = 0
        what = f"{entry.test}: {said(before)} → {said(ours)}"
        if (said(before), said(ours)) == (entry.before, entry.ours):
            print(f"  expected   {what} [{entry.requirement}] {entry.reason}")
        else:
            unexpected += 1
            print(f"  UNEXPECTED {what}, but {entry.before} → {entry.ours} is what [{entry.requirement}] asks for: "
                  f"{entry.reason}")
            if ours is not None and not ours.good:
                print(indented(ours.detail, self._lines))
        if entry.corrections:
            for way in NAMES:
                outcomes = self.outcomes.get((way, True))
                if outcomes is None:
                    continue
                outcome = outcomes.get(entry.test)
                wanted = entry.corrected_before if way == "mlx-lm" else "pass"
                print(f"             the corrected test {NAMES[way]}: {said(outcome)}"
                      f"{'' if said(outcome) == wanted else f', but it should be: {wanted}'}")
                if said(outcome) != wanted:
                    unexpected += 1
                    if outcome is not None and not outcome.good:
                        print(indented(outcome.detail, self._lines))
        return unexpected

    def print_common_failures(self) -> None:
        baseline = OWN_FAILURES if self.baseline is None else {t for t, o in self.baseline.items() if not o.good}
        common = sorted(test for test, outcome in self.ours.items() if not outcome.good and test in baseline)
        if common:
            print(f"{len(common)} fail on mlx-lm's caches too:")
        for test in common:
            ours = self.ours[test]
            why = f" ({OWN_FAILURES[test]})" if test in OWN_FAILURES else ""
            print(f"  {test}: {ours.outcome}: {ours.last_line}{why}")
            before = ours if self.baseline is None else self.baseline[test]
            if ours.last_line != before.last_line:
                print(f"      on mlx-lm's caches: {before.outcome}: {before.last_line}")

    def final_counts(self) -> tuple[int, int]:
        """Of ours: (passed, failed). A test that had to be corrected counts by its corrected form."""
        mended = self.outcomes.get(("reprise", True), {})
        final = {test: mended.get(test, outcome) for test, outcome in self.ours.items()}
        passed = sum(outcome.outcome == "pass" for outcome in final.values())
        return passed, sum(not outcome.good for outcome in final.values())


def print_logits_differences(folder: pathlib.Path) -> int:
    """Returns the number of models whose logits differ."""
    from mlx_lm_model_logits import differences

    files = [{file.name for file in (folder / way).glob("*.npz")} for way in NAMES]
    different = 0
    for name in sorted(files[0] & files[1]):
        if lines := differences(*(folder / way / name for way in NAMES), LOGITS_TOLERANCE):
            different += 1
            print(f"  UNEXPECTED logits of {name.removesuffix('.npz')}")
            print(indented("\n".join(lines), None))
    if files[0] & files[1]:
        print(f"logits of {len(files[0] & files[1])} models compared: {different} differ")
    return different


def said(outcome: Outcome | None) -> str:
    return "not run" if outcome is None else outcome.outcome


def check_files(arguments: argparse.Namespace, sources: dict[str, str]) -> list[str]:
    if arguments.ci:
        tree = ast.parse(sources["test_models"])
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if missing := sorted(set(CACHE_TESTS) - names):
            raise CannotRun(f"test_models has no {', '.join(missing)}: CACHE_TESTS must name tests that are there")
        return ["test_prompt_cache", "test_models"]
    files = [name.strip().removesuffix(".py") for name in arguments.files.split(",") if name.strip()] or list(FILES)
    for name in files:
        if name not in sources or not name.startswith("test_"):
            raise CannotRun(f"mlx-lm has no tests/{name}.py; it has {', '.join(sorted(sources))}")
    return files


def compare(arguments: argparse.Namespace, folder: pathlib.Path) -> int:
    ways = [way for way in NAMES if not (way == "mlx-lm" and arguments.without_baseline)
            and not (way == "reprise" and arguments.baseline_only)]
    check_model(arguments.model)
    sources = test_sources(arguments.distribution)
    files = check_files(arguments, sources)
    environment = test_environment(folder / "hub")
    print(f"{check_modules(ways, files, environment, folder)}; model {arguments.model}", flush=True)

    names = {"test_models": CACHE_TESTS} if arguments.ci else {}
    to_correct = [entry for entry in EXPECTED if entry.corrections and entry.test.split(".")[0] in files
                  and arguments.only in entry.test]
    make_hub_cache(folder / "hub", arguments.model)
    write_tests(folder / "upstream", sources, arguments.model)
    write_tests(folder / "corrected", corrected(sources, to_correct), arguments.model)
    tasks = []
    for file in files:
        logits = file == "test_models" and not (arguments.ci or arguments.without_logits)
        tasks += [Task(way, folder / "upstream", file, arguments.only, names.get(file, ()),
                       folder / "logits" / way if logits else None) for way in ways]
        tests = tuple(entry.test.rpartition(".")[2] for entry in to_correct if entry.test.split(".")[0] == file)
        if tests:
            tasks += [Task(way, folder / "corrected", file, "", tests) for way in ways]
    for way in ways:
        (folder / "logits" / way).mkdir(parents=True)
    logs = arguments.logs or folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(run_tasks(tasks, logs, arguments, environment), "corrected", arguments.verbose)

    for test, host in sorted(comparison.hosts):
        print(f"{test} wanted to reach {host}; no test may use the network, whichever caches it runs on")
    print()
    for way in ways:
        print(f"{NAMES[way]}: {tally(comparison.outcomes.get((way, False), {}).values())}")
    if arguments.baseline_only:
        baseline = comparison.baseline or {}
        print(f"{sum(o.outcome == 'pass' for o in baseline.values())} passed, "
              f"{sum(not o.good for o in baseline.values())} failed")
        return 0
    print("differences between the two:" if comparison.baseline else "failures that mlx-lm is not known to have:")
    unexpected = comparison.print_differences()
    if not arguments.without_baseline:
        unexpected += print_logits_differences(folder / "logits")
    comparison.print_common_failures()
    passed, failed = comparison.final_counts()
    if unexpected:
        print(f"{unexpected} of the differences should not be")
    if passed + failed == 0:
        raise CannotRun("no test has been run: nothing matches what --files and --only ask for")
    print(f"{passed} passed, {failed} failed")
    return 1 if unexpected else 0


def main() -> int:
    arguments = parse_arguments()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mlx_lm_tests_"))
    status = 2
    try:
        status = compare(arguments, folder)
    except CannotRun as error:
        print(f"run_mlx_lm_tests: {error}", file=sys.stderr)
    finally:
        if status == 1 and not arguments.logs:
            print(f"what the tests printed is in {folder / 'logs'}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
