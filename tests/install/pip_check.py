"""What pip has installed: complete, typed, independent of where it was built, and it works. Takes the checkout's path.

Run with `python -I`, so that nothing but the installation is found.
"""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tempfile


def check(condition: object, what: str) -> None:
    if not condition:
        sys.exit(f"pip_check: {what}")


source = pathlib.Path(sys.argv[1])
distribution = importlib.metadata.distribution("reprise")
installed = {str(file): pathlib.Path(file.locate()) for file in distribution.files or ()}
metadata = distribution.metadata

version = re.search(r"project\(reprise VERSION ([0-9.]+)", (source / "CMakeLists.txt").read_text())[1]
check(distribution.version == version, f"the version is {version}, but the package says {distribution.version}")
check(metadata["Requires-Python"] == ">=3.10", "requires Python 3.10")
check(set(metadata.get_all("Provides-Extra")) == {"cpu", "mlx-lm"}, "has the extras cpu and mlx-lm")
check(metadata["License-Expression"] == "MIT", "names its licence")

expected = {f"reprise/{file.name}" for file in (source / "python/reprise").iterdir() if file.suffix in (".py", ".typed")}
expected |= {"reprise/_core.pyi"}
missing = expected - installed.keys()
check(not missing, f"these files were not installed: {sorted(missing)}")
check(any(name.endswith("licenses/LICENSE") for name in installed), "the licence is not installed")
strangers = [name for name in installed if not name.startswith(("reprise/", "reprise-"))]
check(not strangers, f"these files have no business there: {strangers}")

(module,) = (path for name, path in installed.items() if name.startswith("reprise/_core.") and path.suffix == ".so")
check(str(source).encode() not in module.read_bytes(), "the module names the folder that it was built in")
# In a process without mlx.core, libmlx is found by the module's own search path.
subprocess.run([sys.executable, "-I", "-c", "import ctypes, sys; ctypes.PyDLL(sys.argv[1])", module], check=True)
if sys.platform == "linux":
    maps = "import reprise.cache; print(open('/proc/self/maps').read())"
    loaded = subprocess.run([sys.executable, "-I", "-c", maps], check=True, capture_output=True, text=True).stdout
    check("openblas" not in loaded, "OpenBLAS is loaded: MLX has its own BLAS in Python, and this one is of no use")
    check(len(set(re.findall(r"\S*/libmlx\.so", loaded))) == 1, "not one libmlx is loaded")

import mlx.core as mx  # noqa: E402

import reprise  # noqa: E402
import reprise.cache  # noqa: E402

check(reprise.__version__ == version, f"reprise.__version__ is {reprise.__version__}")
# What the package asks pip for is what it asks for when it is imported, and what the tests pin.
wanted = f"mlx=={reprise._MLX_VERSION}"
check(wanted in distribution.requires, f"{wanted} is not among {distribution.requires}")
pinned = re.search(r"^mlx==[0-9.]+", (source / "tools/requirements_python.txt").read_text(), re.MULTILINE)[0]
check(pinned == wanted, f"the tests are pinned to {pinned}, not to {wanted}")
cache = reprise.cache.KVCache()
cache.update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 32)))
fork = cache.fork()
fork.trim(2)
check((cache.offset, fork.offset) == (3, 1), "a fork is not independent")
with tempfile.TemporaryDirectory() as folder:
    reprise.cache.save_prompt_cache(f"{folder}/a.safetensors", [cache])
    (loaded_cache,) = reprise.cache.load_prompt_cache(f"{folder}/a.safetensors")
check(mx.array_equal(loaded_cache.state[0], cache.state[0]), "a file holds something else")
