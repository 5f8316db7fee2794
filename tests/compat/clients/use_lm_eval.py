"""The same small task by lm-eval's client of an API and by its own engine: prints both lists of numbers."""

import json
import os
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.task import ConfigurableTask

model, work = sys.argv[1], Path(sys.argv[2])
rows = [
    {"question": "the quick brown", "choices": [" fox", " dog", " model"], "answer": 0},
    {"question": "jumps over the", "choices": [" lazy dog", " node", " serves"], "answer": 0},
    {"question": "serves a", "choices": [" model", " fox from", " quick"], "answer": 2},
]
(work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(kind: str, arguments: dict[str, object]) -> list[float]:
    """Return the log probability of each choice of each row."""
    task = ConfigurableTask(
        config={
            "task": "tiny",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(work / "rows.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
    )
    found = lm_eval.simple_evaluate(model=kind, model_args=arguments, tasks=[task], bootstrap_iters=0, log_samples=True)
    samples = sorted(found["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    return [float(response[0][0]) for sample in samples for response in sample["resps"]]


address = f"{os.environ['OPENAI_BASE_URL']}/completions"
ours = results(
    "local-completions",
    {"model": "tiny", "base_url": address, "tokenizer": model, "tokenizer_backend": "huggingface", "max_length": 512},
)
theirs = results("hf", {"pretrained": model, "dtype": "float32", "device": "cpu"})
print(json.dumps([ours, theirs]))
