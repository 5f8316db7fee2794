"""Schemathesis reads the description of the API, and sends 10,000 requests that fit it or do not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jwt")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from gateway_server import serving

LEAST_CASES = 10_000
EXAMPLES = 90  # of each operation; the cases of the coverage phase come on top


@pytest.mark.minutes
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_get_no_500_and_only_answers_of_the_description(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="NOT TESTED: schemathesis is missing; make compat installs it")
    with serving() as served:
        token = served.cluster.run("hctl", "token", "create", "--scope=read,submit,manage,admin").stdout.strip()
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", f"https://localhost:{served.port}/api/v1/openapi.json",
            f"--header=Authorization: Bearer {token}", f"--tls-verify={served.base / 'gateway.crt'}", "--phases=coverage,fuzzing",
            f"--max-examples={EXAMPLES}", "--seed=1", "--continue-on-failure", "--generation-database=none", "--no-color",
            "--exclude-path-regex=/(events|log/stream)$",  # these answers do not end
            "--exclude-checks=positive_data_acceptance",  # a schema cannot say which jobs exist
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1700)
        found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert done.returncode == 0, done.stdout[-5000:]
        assert found is not None, done.stdout[-2000:]
        assert int(found[2]) >= LEAST_CASES
        log = (served.cluster.config_dir / "state" / "hpcschedd.log").read_text()
        assert "fault" not in log
