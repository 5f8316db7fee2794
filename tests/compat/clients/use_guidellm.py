"""guidellm measures the model with made texts, a stream at a time: prints what its report says of the requests."""

import os
import subprocess
import sys
from pathlib import Path

tokenizer, work = sys.argv[1], Path(sys.argv[2])
report = work / "report.json"
command = [
    *(sys.executable, "-m", "guidellm", "run", "--disable-console-interactive"),
    *("--backend", f"kind=openai_http,target={os.environ['OPENAI_BASE_URL']},model=tiny"),
    *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
    *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12"),
    *("--profile", "kind=synchronous"),
    *("--constraint", "kind=max_requests,count=6"),
    *("--output", f"kind=json,path={report}"),
]
done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
print(report.read_text())
