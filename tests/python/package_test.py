"""What `import reprise` gives, and what it says where it cannot work."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import reprise

PACKAGE = pathlib.Path(reprise.__file__).parent


def last_line_of_import(*folders):
    """What `import reprise` ends with, these folders first on the path."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, folders)))
    done = subprocess.run(
        [sys.executable, "-c", "import reprise"], env=environment, cwd=folders[0], capture_output=True, text=True
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode != 0 else ""


class PackageTest(unittest.TestCase):
    def test_has_its_version(self):
        self.assertRegex(reprise.__version__, r"^\d+\.\d+\.\d+$")
        self.assertIn("__version__", reprise.__all__)  # else type checkers take it for private

    def test_another_mlx_is_named_with_the_command_that_mends_it(self):
        with tempfile.TemporaryDirectory() as folder:
            metadata = pathlib.Path(folder, "mlx-0.31.0.dist-info", "METADATA")
            metadata.parent.mkdir()
            metadata.write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.31.0\n")
            line = last_line_of_import(folder, PACKAGE.parent)
        self.assertRegex(line, r"^ImportError: .*mlx 0\.31\.0 is installed")
        # MLX's backend for Linux is a distribution of its own, which `mlx` alone leaves as it is.
        self.assertRegex(line, r"pip install 'mlx\[cpu\]==")

    def test_files_without_the_native_module_say_how_to_build_it(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "reprise")
            shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_core*", "__pycache__"))
            line = last_line_of_import(folder)
        self.assertRegex(line, rf"^ImportError: .*Python {sys.version_info[0]}\.{sys.version_info[1]}")
        self.assertIn(str(copy), line)
        self.assertIn("pip install", line)


if __name__ == "__main__":
    unittest.main()
