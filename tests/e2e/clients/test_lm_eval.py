"""EleutherAI's evaluation harness on a small task of our own, by likelihoods (echo with logprobs) and by answers."""

import json

import pytest

from crossdock.client import Client, Generation
from service.config import DEFAULT_MODEL

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

QUESTIONS = (
    {"question": "The capital of France is", "choices": [" Paris", " banana", " 17"], "answer": 0},
    {"question": "Two and two make", "choices": [" green", " four", " seldom"], "answer": 1},
    {"question": "Water is made of hydrogen and", "choices": [" music", " Tuesday", " oxygen"], "answer": 2},
    {"question": "The sun rises in the", "choices": [" east", " fridge", " seven"], "answer": 0},
)

LIKELIHOODS = """
task: ours_likelihoods
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""

ANSWERS = """
task: ours_answers
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def lm_eval(environment):
    return environment("lm-eval", "lm-eval[api]==0.4.13")


@pytest.fixture(scope="module", params=[1, 4])
def samples(request, lm_eval, exact_stack, tmp_path_factory):
    """By task: what the harness noted of each question, with so many of them in a call."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, task in (("likelihoods", LIKELIHOODS), ("answers", ANSWERS)):
        (folder / f"{name}.yaml").write_text(task.replace("FILE", str(questions)))
    model = f"model={DEFAULT_MODEL},base_url={exact_stack.http}/v1/completions,tokenizer_backend=remote"
    argv = ["lm_eval", "run", "--model", "local-completions", "--model_args", f"{model},num_concurrent=4"]
    argv += ["--tasks", "ours_likelihoods,ours_answers", "--include_path", str(folder)]
    argv += ["--batch_size", str(request.param)]
    lm_eval.run(*argv, "--output_path", str(folder / "out"), "--log_samples", timeout=600, HF_HUB_OFFLINE="1")
    found = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name.split("_20")[0]] = sorted(rows, key=lambda row: row["doc_id"])
    return found


def test_likelihoods_are_those_of_the_tokens_as_the_model_generates_them(samples, exact_stack):
    with Client(exact_stack.grpc) as client:
        for question, sample in zip(QUESTIONS, samples["samples_ours_likelihoods"], strict=True):
            greedy = client.generate(
                question["question"], Generation(temperature=0.0, max_tokens=1, logprobs=20)
            )
            known = dict(greedy.logprobs[0].top)
            for choice, (logprob, is_greedy) in zip(
                question["choices"], sample["filtered_resps"], strict=True
            ):
                tokens = client.tokenize(choice)
                if len(tokens) == 1 and tokens[0] in known:
                    assert float(logprob) == pytest.approx(known[tokens[0]], abs=1e-4)
                assert (str(is_greedy) == "True") == (tokens[0] == greedy.token_ids[0] and len(tokens) == 1)


def test_likely_answers_are_found_to_be_right(samples):
    assert [sample["acc"] for sample in samples["samples_ours_likelihoods"]] == [1.0] * len(QUESTIONS)


def test_answers_are_those_of_a_stub(samples, exact_stack):
    with Client(exact_stack.grpc) as client:
        for question, sample in zip(QUESTIONS, samples["samples_ours_answers"], strict=True):
            how = Generation(temperature=0.0, max_tokens=6, stop=("\n", "<|im_end|>"))
            assert sample["resps"][0][0] == client.generate(question["question"], how).text
