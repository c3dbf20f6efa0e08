"""Authorities and certificates for tests, made by the openssl command."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    path: Path
    key: Path

    def pem(self):
        return self.path.read_bytes()

    def flags(self, prefix="ssl"):
        return (f"--{prefix}-certfile={self.path}", f"--{prefix}-keyfile={self.key}")


class Authority:
    """Signs for 127.0.0.1 and localhost, whatever the name."""

    def __init__(self, folder, name="authority"):
        self._folder = folder
        self.own = self._files(name)
        _openssl("req", "-x509", *_NEW_KEY, *self._out(self.own), "-days", "2", "-subj", f"/CN={name}")

    @property
    def path(self):
        return self.own.path

    def pem(self):
        return self.own.pem()

    def issue(self, name):
        made = self._files(name)
        names = f"subjectAltName=DNS:{name},DNS:localhost,IP:127.0.0.1"
        by = ("-CA", self.own.path, "-CAkey", self.own.key)
        _openssl(
            "req", "-x509", *_NEW_KEY, *self._out(made), *by, "-days", "2", "-subj", f"/CN={name}",
            "-addext", names, "-addext", "basicConstraints=CA:FALSE",
        )  # fmt: skip
        return made

    def _files(self, name):
        return Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")

    def _out(self, made):
        return ("-keyout", made.key, "-out", made.path)


def _openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
