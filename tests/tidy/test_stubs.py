"""The committed stubs are what the contracts give."""

import subprocess
import sys


def test_committed_stubs_are_what_the_protos_generate(root, tmp_path):
    protos = sorted(str(path) for path in (root / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(root / "protos"), *outputs, *protos], check=True
    )
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    committed = {
        path.relative_to(root): path.read_text()
        for path in (root / "crossdock").rglob("*_pb2*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert sorted(committed) == sorted(generated)
    assert [str(path) for path in generated if generated[path] != committed[path]] == [], "run: make stubs"


def test_the_contracts_keep_to_the_rules_of_buf(root):
    subprocess.run([f"{sys.prefix}/bin/buf", "lint"], cwd=root, check=True)
