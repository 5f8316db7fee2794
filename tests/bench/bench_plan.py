"""How well the planner predicts: bands on real logs, and the memory of models beside what torch takes.

Bands: of each period of 28 days, in how many the true mean wait, and the gain of a tenth more processors, is within the 80 % band
that only the days before gave. The KTH's log is in the tests; HPCSCHED_TRACES names a directory with more (NAME.swf.gz).

Memory: models of Hugging Face transformers, if these are installed, trained and served in a process each; the peak is what the
process holds more than before, with an allocator that gives large blocks back at once (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from hpcsched.planner.capacity import Arrival, PlanNode, backtest, days_of
from hpcsched.planner.memory import MIB, Serving, Training, model_from_config, serving_need, training_need
from hpcsched.sim.swf import read_trace
from tests.bench.figures import Figure

KTH = Path(__file__).parents[1] / "golden" / "traces" / "KTH-SP2.swf.gz"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gpt2")
SETTINGS = ("adamw", "adamw+recompute", "sgd", "serve")
BATCH, SEQUENCE = 2, 512

CHILD = """
import json, sys
import torch
import transformers as T
family, setting, batch, sequence = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
wide = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, vocab_size=16000)
config = {
    "llama": lambda: T.LlamaConfig(**wide, num_key_value_heads=8),
    "mistral": lambda: T.MistralConfig(**wide, num_key_value_heads=2, sliding_window=None),
    "qwen2": lambda: T.Qwen2Config(**wide, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: T.Qwen3Config(**wide, num_key_value_heads=4, head_dim=128, tie_word_embeddings=True),
    "gemma": lambda: T.GemmaConfig(**wide, num_key_value_heads=1, head_dim=64),
    "gpt2": lambda: T.GPT2Config(n_embd=512, n_layer=8, n_head=8, vocab_size=16000, n_positions=1024),
}[family]()

def held(what):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))

small = T.AutoModelForCausalLM.from_config(T.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64))
tokens = torch.zeros(1, 8, dtype=torch.long)
small(input_ids=tokens, labels=tokens).loss.backward()
torch.optim.AdamW(small.parameters()).step()
before = held("VmRSS")
model = T.AutoModelForCausalLM.from_config(config)
tokens = torch.randint(0, config.vocab_size, (batch, sequence))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
if setting == "serve":
    model.eval()
    with torch.no_grad():
        out = model(input_ids=tokens[:, :-4], use_cache=True, logits_to_keep=1)
        for at in range(4):
            out = model(input_ids=tokens[:, at:at + 1], past_key_values=out.past_key_values, use_cache=True)
else:
    if "recompute" in setting:
        model.gradient_checkpointing_enable()
    model.train()
    kind = torch.optim.SGD if setting == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.001, foreach=False)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
print(json.dumps({"peak": held("VmHWM") - before, "config": config.to_dict()}, default=str))
"""


def run(quick: bool) -> list[Figure]:
    """Return the figures; `quick`: of the KTH's log and two families."""
    return [*_bands(quick), *_memory(FAMILIES[:1] + FAMILIES[-1:] if quick else FAMILIES)]


def _bands(quick: bool) -> list[Figure]:
    logs = [KTH]
    if not quick and (more := os.environ.get("HPCSCHED_TRACES")):
        logs = sorted(Path(more).glob("*-SP2.pyss.swf.gz")) or logs
    figures, windows, waits, gains, signs = [], 0, 0, 0, 0
    for log in logs:
        trace = read_trace(log)
        jobs = [Arrival(each.submit_s, each.run_s, each.asked_s, 1, each.procs, 0) for each in trace.jobs]
        pool = PlanNode("pool", trace.procs, 0)
        began_s = time.process_time()
        tested = backtest((pool,), (pool._replace(cpus=int(trace.procs * 1.1)),), days_of(jobs, False), False)
        took_s = (time.process_time() - began_s) / max(1, tested.windows)
        windows, waits = windows + tested.windows, waits + tested.wait_within
        gains, signs = gains + tested.gain_within, signs + tested.sign_right
        figures.append(Figure(name=f"{log.name}: a forecast of 28 days, cpu", value=took_s, unit="s", bar="<= 10"))
    for name, count, bar in (
        ("mean waits within the band", waits, "70 to 90 %"),
        ("gains of a tenth more within the band", gains, "70 to 90 %"),
        ("directions of the gain that are right", signs, ">= 95 %"),
    ):
        figures.append(Figure(name=f"{name}, of {windows}", value=100 * count / windows, unit="%", bar=bar))
    return figures


def _memory(families: tuple[str, ...]) -> list[Figure]:
    if importlib.util.find_spec("transformers") is None:
        print("plan: the memory of models is not measured: transformers is not installed", file=sys.stderr)
        return []
    figures = []
    for family in families:
        for setting in SETTINGS:
            words = [sys.executable, "-c", CHILD, family, setting, str(BATCH), str(SEQUENCE)]
            env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=True)
            answer = json.loads(done.stdout)
            model = model_from_config(answer["config"], family)
            if setting == "serve":
                need = serving_need(model, Serving(streams=BATCH, context=SEQUENCE, dtype="fp32", cache_dtype="fp32"))
            else:
                kind, _, recompute = setting.partition("+")
                need = training_need(
                    model, Training(batch=BATCH, sequence=SEQUENCE, optimizer=kind, recompute=bool(recompute))
                )
            figures.append(
                Figure(
                    name=f"{family}, {setting}: predicted peak",
                    value=need.peak / MIB,
                    unit="MiB",
                    bar="0.90 to 1.10",
                    floor=answer["peak"] / MIB,
                    floor_name="of torch",
                )
            )
    return figures
