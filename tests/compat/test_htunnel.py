"""htunnel: what a job serves on its node is reached from the head."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from clientrun import Client
from waiting import PATIENCE_S, wait_until

from hpcsched.loopback.cluster import LocalCluster

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (os.environ["SLURM_JOB_ID"] + self.path).encode() * 100_000
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open("port", "w") as file:
    print(server.server_port, file=file)
server.serve_forever()
"""


def test_a_server_in_a_job(cluster: LocalCluster, slurm: Client) -> None:
    (cluster.share / "serve.py").write_text(SERVER)
    job_id = slurm("sbatch", "--parsable", "-w", "n2", "--wrap", f"{sys.executable} serve.py").stdout.strip()
    port_file = cluster.share / "port"
    port = wait_until(lambda: port_file.exists() and port_file.read_text().strip(), what="the server")
    run = "import sys; from hpcsched.cli.htunnel import main; sys.exit(main())"
    command = [sys.executable, "-c", run, job_id, port]
    tunnel = subprocess.Popen(command, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert tunnel.stdout is not None
        line = tunnel.stdout.readline()
        match = re.match(rf"(http://127\.0\.0\.1:\d+) is port {port} of job {job_id}; ", line)
        assert match, (line, tunnel.poll())

        def get(number: int) -> bool:
            with urllib.request.urlopen(f"{match[1]}/{number}", timeout=PATIENCE_S) as answer:
                return answer.read() == f"{job_id}/{number}".encode() * 100_000

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(get, range(8)))
        tunnel.send_signal(signal.SIGINT)
        assert tunnel.wait(PATIENCE_S) == 0
    finally:
        tunnel.kill()
        tunnel.wait()
        slurm("scancel", job_id)
