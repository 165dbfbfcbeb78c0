"""mlx-lm's own tests as files: where they come from and what has to be there to run them."""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from typing import Iterable

VERSION = "0.32.2"
ARCHIVE = f"mlx_lm-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "1af8a92f6a141c3e2bf5b0369ac4464203a8e2189c47b9e40d3e921e5b3a1fe9"
HUB_MODEL = "mlx-community/Qwen1.5-0.5B-Chat-4bit"

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "mlx_lm"


class CannotRun(Exception):
    """The tests cannot be run; the text says what to do about it."""


def test_sources(folder: pathlib.Path | None) -> dict[str, str]:
    """The test files of the distribution, by module name."""
    if folder is not None:
        if not (folder / "tests" / "test_prompt_cache.py").is_file():
            raise CannotRun(f"{folder} is not mlx-lm's unpacked source distribution: "
                            "it has no tests/test_prompt_cache.py")
        if f"\nVersion: {VERSION}\n" not in (folder / "PKG-INFO").read_text():
            raise CannotRun(f"{folder} is not version {VERSION} of mlx-lm: its PKG-INFO says otherwise")
        return {file.stem: file.read_text() for file in sorted((folder / "tests").glob("*.py"))}
    with tarfile.open(fetch_archive()) as archive:
        sources = {}
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if member.isfile() and path.parent.name == "tests" and path.suffix == ".py":
                sources[path.stem] = archive.extractfile(member).read().decode()
        return sources


def fetch_archive() -> pathlib.Path:
    archive = CACHE / ARCHIVE
    if archive.is_file() and hashlib.sha256(archive.read_bytes()).hexdigest() == ARCHIVE_SHA256:
        return archive
    print(f"fetching mlx-lm {VERSION}'s source distribution", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        requirements = pathlib.Path(folder) / "requirements.txt"
        requirements.write_text(f"mlx-lm=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--require-hashes", "--no-binary", "mlx-lm", "-d", folder, "-r", str(requirements)]
        result = subprocess.run(command, text=True, capture_output=True)
        got = pathlib.Path(folder) / ARCHIVE
        if result.returncode != 0 or not got.is_file():
            raise CannotRun(f"could not download mlx-lm {VERSION}'s source distribution (pip download):\n"
                            f"{result.stderr.strip()}\n"
                            "Without a network, unpack it elsewhere and name it: --distribution FOLDER")
        os.replace(got, archive)
    return archive


def check_model(folder: pathlib.Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise CannotRun(f"{folder} is not an MLX model folder: it has no {name}. `./run test` makes the default "
                            "one (tools/gguf_to_mlx.py MODEL.gguf FOLDER another); name it with --model FOLDER")


def check_modules(ways: Iterable[str], files: Iterable[str], environment: dict[str, str], folder: pathlib.Path) -> str:
    """Requires of this Python what the tests import. Returns the versions as text.

    It is asked in an empty folder: in the checkout, the C++ sources in reprise/ would pass for a package of that name.
    """

    def ask(code: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, text=True, capture_output=True)

    modules = ["mlx.core", "mlx_lm"]
    if "test_server" in files:
        modules.append("requests")
    if "reprise" in ways:
        modules += ["reprise", "reprise.mlx_lm"]
    for name in modules:
        result = ask(f"import {name}")
        if result.returncode == 0:
            continue
        said = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        if f"No module named '{name}'" in said and name == "reprise":
            raise CannotRun(f"{sys.executable} finds no module 'reprise'. Install it (pip install ./python), or say "
                            "where it was built: PYTHONPATH=build/<preset>/python. --baseline-only does without it")
        if f"No module named '{name.split('.')[0]}'" in said:
            package = {"mlx.core": "mlx[cpu]", "mlx_lm": f"mlx-lm=={VERSION}"}.get(name, name)
            raise CannotRun(f"{sys.executable} has no {name}. "
                            f"Run this script with a Python that has it: pip install {package}")
        raise CannotRun(f"{sys.executable} cannot import {name}: {said}")
    found, mlx = ask("from importlib.metadata import version as v; import mlx.core as mx; "
                     "print(v('mlx-lm'), mx.__version__)").stdout.split()
    if found != VERSION:
        raise CannotRun(f"{sys.executable} has mlx-lm {found}, but these tests are of {VERSION}: "
                        f"pip install mlx-lm=={VERSION}")
    return f"mlx-lm {found}, mlx {mlx}"


def test_environment(hub: pathlib.Path) -> dict[str, str]:
    """Offline, with a hub cache of its own, and with paths that hold wherever a test is run."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false"}


def make_hub_cache(folder: pathlib.Path, model: pathlib.Path) -> None:
    """A hub cache that has the model under the hub model's name. The server lists the models that it finds there by
    their files; nothing is loaded from it."""
    commit = "0" * 40
    repository = folder / ("models--" + HUB_MODEL.replace("/", "--"))
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    for file in model.resolve().iterdir():
        (snapshot / file.name).symlink_to(file)
    if not (snapshot / "model.safetensors.index.json").exists():
        (snapshot / "model.safetensors.index.json").write_text("{}")


def write_tests(folder: pathlib.Path, sources: dict[str, str], model: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for name, text in sources.items():
        text = text.replace(json.dumps(HUB_MODEL), json.dumps(str(model.resolve())))
        (folder / f"{name}.py").write_text(text)
