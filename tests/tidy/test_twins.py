"""The two workers are two programs, not one program twice."""

import difflib
import re

COMMON_MAX = 0.35
# A thin file of the same shape, such as a servicer, is what the shared shell leaves to each worker.
THIN_LINES = 60
ROLE = re.compile(r"prefill|decode", re.IGNORECASE)


def test_files_of_the_same_name_in_both_workers_differ(sources):
    first = {_name(source): source for source in sources if source.package == "prefill_worker"}
    second = {_name(source): source for source in sources if source.package == "decode_worker"}
    twins = {
        name: share
        for name in first.keys() & second.keys()
        if max(len(_code_lines(first[name].text)), len(_code_lines(second[name].text))) > THIN_LINES
        and (share := common_share(first[name].text, second[name].text)) > COMMON_MAX
    }
    assert twins == {}


def test_a_file_and_its_copy_with_the_roles_exchanged_count_as_twins():
    file = "\n".join(f"prefill_{number} = Prefill({number})" for number in range(20))
    assert common_share(file, file.replace("prefill", "decode").replace("Prefill", "Decode")) == 1.0


def common_share(first: str, second: str) -> float:
    """Of the lines of both, how many stand in the other as well; role words count as equal."""
    lines = [_code_lines(text) for text in (first, second)]
    return difflib.SequenceMatcher(None, *lines, autojunk=False).ratio()


def _name(source) -> str:
    return source.path.split("/", 1)[1]


def _code_lines(text: str) -> list[str]:
    """Imports, blank lines and closing brackets are alike everywhere and say nothing."""
    lines = (ROLE.sub("role", line.strip()) for line in text.splitlines())
    return [line for line in lines if line.strip("()[]{},") and not line.startswith(("import ", "from "))]
