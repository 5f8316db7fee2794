"""Answers and streams through `llm`, with a model that its settings name."""

import json
import os
import subprocess
import sys
from pathlib import Path

home = Path(sys.argv[1])
models = [{"model_id": "ours", "model_name": "tiny", "api_base": os.environ["OPENAI_BASE_URL"]}]
(home / "extra-openai-models.yaml").write_text(json.dumps(models))
env = os.environ | {"LLM_USER_PATH": str(home)}
for words in (["--no-stream"], []):
    command = [sys.executable, "-m", "llm", "-m", "ours", "hello", "-o", "temperature", "0", "-o", "max_tokens", "8"]
    done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), done
