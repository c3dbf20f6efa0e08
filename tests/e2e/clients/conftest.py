"""Programs that other people wrote, each in an environment of its own, against real processes."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALL_TIMEOUT_S = 600


class Environment:
    """A virtual environment. Skips the test where there is no index to install from."""

    def __init__(self, folder, *requirements):
        venv.create(folder, with_pip=False)
        self.folder = folder
        pip = (sys.executable, "-m", "pip", "--python", self.program("python"), "--disable-pip-version-check")
        argv = [*pip, "install", "-q", "--no-compile", *requirements]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip does not install {' '.join(requirements)} in {INSTALL_TIMEOUT_S} s")
        if done.returncode:
            pytest.skip(
                f"pip cannot install {' '.join(requirements)}: {done.stderr.strip().splitlines()[-1:]}"
            )

    def program(self, name):
        return str(self.folder / "bin" / name)

    def run(self, *argv, timeout=110, **environ):
        """What the program printed; it must end well."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.program(argv[0]), *argv[1:]],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=inherited | environ,
            cwd=self.folder,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def ask(self, script, *argv):
        """What a script beside this file printed, which is JSON."""
        return json.loads(self.run("python", str(HERE / script), *argv))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Makes one with these packages."""
    return lambda name, *requirements: Environment(tmp_path_factory.mktemp(name), *requirements)
