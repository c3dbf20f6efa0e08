"""The contracts as files for stubs in other languages."""

import subprocess
import sys

from commands.main import main


def test_the_exported_contracts_are_the_public_ones_and_stand_by_themselves(tmp_path, capsys):
    assert main(["proto", "export", str(tmp_path / "made")]) == 0
    written = sorted((tmp_path / "made").rglob("*.proto"))
    assert sorted(capsys.readouterr().out.split()) == [str(path) for path in written]
    names = [path.relative_to(tmp_path / "made").as_posix() for path in written]
    assert {"crossdock/v1/inference.proto", "crossdock/v1/control.proto"} <= set(names)
    assert not any("worker" in name for name in names)
    argv = ["-m", "grpc_tools.protoc", "-I", tmp_path / "made", f"--python_out={tmp_path}", *names]
    subprocess.run([sys.executable, *argv], check=True)


def test_contracts_that_cannot_be_written_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main(["proto", "export", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
